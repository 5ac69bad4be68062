"""`jaxllm chat`: the conversation in a terminal."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllm import JaxLLMError, SamplingParams
from jaxllm.server.commands.answer import Answer, AnswerStream, AnswerTo, Message
from jaxllm.server.commands.chat.session import ChatSession
from jaxllm.server.commands.figures import Figures
from jaxllm.server.commands.terminal import OutputError, as_text, note, print_stream, show

if TYPE_CHECKING:
    from jaxllm import LLM

HELP = """\
/reset        begin a new conversation, with the same system text
/system TEXT  what the model is told before the conversation; without TEXT, nothing
/exit         leave, as does Ctrl-D
Ctrl-C        stop the answer; pressed twice, at once"""


_BOM = "\ufeff"


class Chat:
    """Reads questions from stdin and prints answers to stdout until stdin ends or the user leaves.

    answer_to: the model, here (`answers_of`) or at a server.
    max_tokens: of an answer; None: until the context is full.
    max_model_len: the context, in tokens; None: not known.
    """

    def __init__(
        self,
        answer_to: AnswerTo,
        figures: Figures,
        *,
        max_tokens: int | None,
        max_model_len: int | None,
        system: str = "",
    ):
        self._session = ChatSession(answer_to, system=system)
        self._max_tokens, self._max_model_len = max_tokens, max_model_len
        self._figures = figures

    def run(self) -> None:
        if is_terminal := sys.stdin.isatty():
            _use_line_editing()
            context = f"Context: {self._max_model_len:,} tokens. " if self._max_model_len else ""
            note(f"{context}Ctrl-C stops an answer, Ctrl-D leaves; see /help.")
        while True:
            try:
                line = as_text(input("> " if is_terminal else "")).strip().removeprefix(_BOM)
            except UnicodeError as error:
                note(f"error: this line is not UTF-8: {error}")
                continue
            except KeyboardInterrupt:
                note("\n[Ctrl-D or /exit leaves]")
                continue
            except EOFError:
                note("")
                return
            if line.startswith("/"):
                command, _, argument = line.partition(" ")
                if command == "/exit":
                    return
                self._obey(command, argument.strip())
            elif line:
                self._answer(line)

    def _obey(self, command: str, argument: str) -> None:
        if command == "/reset":
            self._session.reset()
            note("[a new conversation]")
        elif command == "/system":
            self._session.system = argument
            note("[from the next answer on]")
        else:
            note(HELP if command == "/help" else f"error: there is no command {command}; these are:\n{HELP}")

    def _answer(self, text: str) -> None:
        start = time.perf_counter()
        try:
            answer = print_stream(self._session.ask(text))
        except KeyboardInterrupt:
            answer = None
        except OutputError:
            raise
        except JaxLLMError as error:
            note(f"error: {error}")
            note("[the message was left out of the conversation; /reset begins a new one]")
            return
        show("\n")
        if answer is None:
            note("[stopped]")
            return
        self._figures.add([answer], time.perf_counter() - start)
        if answer.finish_reason == "length":
            note(self._why_cut_off(answer))

    def _why_cut_off(self, answer: Answer) -> str:
        num_tokens = (answer.num_prompt_tokens or 0) + (answer.num_output_tokens or 0)
        if self._max_model_len is None or num_tokens < self._max_model_len:
            return "[cut off" + ("]" if self._max_tokens is None else f" by --max-tokens {self._max_tokens}]")
        return (
            f"[cut off: the context of {self._max_model_len:,} tokens is full. /reset begins a new "
            "conversation; --max-model-len at the start may give it more room]"
        )


def answers_of(llm: "LLM", params: SamplingParams) -> Callable[[list[Message]], AnswerStream]:
    """The model in this process."""

    def answer_to(messages: list[Message]) -> AnswerStream:
        output = yield from llm.stream(messages, params)
        if (error := output.outputs[0].error) is not None:
            raise JaxLLMError(error)
        return Answer.of(output)

    return answer_to


def _use_line_editing() -> None:
    """Arrow keys and history for `input`, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:  # Windows
        return
