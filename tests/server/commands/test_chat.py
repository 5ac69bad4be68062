import itertools
import os
import signal

import pytest

from jaxllm import SamplingParams
from jaxllm.errors import InvalidRequestError
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.server.commands.chat.chat import Chat, answers_of
from jaxllm.server.commands.chat.session import ChatSession
from jaxllm.server.commands.figures import Figures

MAX_MODEL_LEN = 12


class EchoLLM:
    """Answers with the last message, a word at a time; a token is a word. "forever" has no end."""

    def __init__(self):
        self.asked: list[list[dict[str, str]]] = []
        self.num_open = 0

    def stream(self, messages, params):
        self.asked.append([dict(message) for message in messages])
        words = [word for message in messages for word in message["content"].split()]
        if len(words) >= MAX_MODEL_LEN:
            raise InvalidRequestError(f"the prompt has {len(words)} tokens; max_model_len is {MAX_MODEL_LEN}")
        answer = messages[-1]["content"].split()
        room = min(MAX_MODEL_LEN - len(words), params.max_tokens or MAX_MODEL_LEN)
        self.num_open += 1
        try:
            if answer == ["forever"]:
                for number in itertools.count():
                    if number == 2:
                        os.kill(os.getpid(), signal.SIGINT)
                    yield f"{number} "
            for word in answer[:room]:
                yield f"{word} "
        finally:
            self.num_open -= 1
        return RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=list(range(len(words))),
            outputs=[
                CompletionOutput(0, "", list(range(len(answer[:room]))), "length" if len(answer) >= room else "stop")
            ],
            finished=True,
            metrics=RequestMetrics(arrival_time=0.0),
        )


@pytest.fixture
def llm() -> EchoLLM:
    return EchoLLM()


@pytest.fixture
def chat(llm, monkeypatch, capsys):
    """(lines, ...) -> (stdout, stderr) after these lines are typed. An exception is raised instead."""

    def run(*lines: str | type[BaseException], max_tokens: int | None = None, system: str = ""):
        typed = iter([*lines, EOFError])

        def type_line(prompt: str) -> str:
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", type_line)
        figures = Figures(start_up_s=1.0)
        answer_to = answers_of(llm, SamplingParams(max_tokens=max_tokens))
        Chat(answer_to, figures, max_tokens=max_tokens, max_model_len=MAX_MODEL_LEN, system=system).run()
        run.figures = figures
        return capsys.readouterr()

    return run


def said(*contents: str) -> list[dict[str, str]]:
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_the_conversation_is_kept(chat, llm):
    out, _ = chat("one two", "", "three")
    assert out == "one two \nthree \n"
    assert llm.asked == [said("one two"), said("one two", "one two ", "three")]
    assert len(chat.figures.answers) == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_came_of_it(chat, llm):
    handler = signal.getsignal(signal.SIGINT)
    out, err = chat("forever", "go on")
    assert out.startswith("0 1 2 \n")
    assert "[stopped]" in err
    assert llm.asked[-1] == said("forever", "0 1 2 ", "go on")
    assert llm.num_open == 0
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_typing_leaves_nothing_but_the_line(chat, llm):
    _, err = chat("one", KeyboardInterrupt, "two")
    assert "Ctrl-D or /exit leaves" in err
    assert len(llm.asked) == 2


def test_exit_leaves(chat, llm):
    chat("/exit", "one")
    assert not llm.asked


def test_reset_forgets_all_but_the_system_text(chat, llm):
    chat("one", "/reset", "two", system="be brief")
    assert llm.asked[-1] == [{"role": "system", "content": "be brief"}, *said("two")]


def test_the_system_text_can_be_changed_and_removed(chat, llm):
    chat("/system be very brief", "one", "/system", "two")
    assert llm.asked[0] == [{"role": "system", "content": "be very brief"}, *said("one")]
    assert llm.asked[1] == said("one", "one ", "two")


def test_an_unknown_command_is_an_error_and_not_a_message(chat, llm):
    _, err = chat("/rest")
    assert "there is no command /rest" in err
    assert "/reset" in err
    assert not llm.asked


def test_a_full_context_is_said_and_the_conversation_can_go_on(chat, llm):
    _, err = chat("a b c d e", "f g", "/reset", "h")
    assert "error: the prompt has 12 tokens; max_model_len is 12" in err
    assert "the message was left out of the conversation; /reset begins a new one" in err
    assert llm.asked[-1] == said("h")


def test_an_answer_cut_off_by_a_full_context_says_so(chat):
    _, err = chat("a b c d e f g")
    assert "cut off: the context of 12 tokens is full. /reset begins a new conversation" in err


def test_an_answer_cut_off_by_max_tokens_says_so(chat):
    _, err = chat("a b c", max_tokens=2)
    assert "[cut off by --max-tokens 2]" in err


def test_a_refused_question_is_taken_back(llm):
    session = ChatSession(answers_of(llm, SamplingParams()))
    with pytest.raises(InvalidRequestError):
        list(session.ask(" ".join("a" * 20)))
    assert session.messages == []


def test_an_answer_stopped_before_its_first_piece_is_taken_back(llm):
    session = ChatSession(answers_of(llm, SamplingParams()))
    session.ask("one").close()
    assert session.messages == []
