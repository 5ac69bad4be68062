"""`jaxllm chat`: the conversation in a terminal."""

import sys
import time
from typing import TYPE_CHECKING

from jaxllm import JaxLLMError, RequestOutput, SamplingParams
from jaxllm.server.chat_session import ChatSession
from jaxllm.server.figures import Figures
from jaxllm.server.terminal import note, print_stream

if TYPE_CHECKING:
    from jaxllm import LLM

HELP = """\
/reset        begin a new conversation, with the same system text
/system TEXT  what the model is told before the conversation; without TEXT, nothing
/exit         leave, as does Ctrl-D
Ctrl-C        stop the answer; pressed twice, at once"""


class Chat:
    """Reads questions from stdin and prints answers to stdout until stdin ends or the user leaves."""

    def __init__(self, llm: "LLM", params: SamplingParams, figures: Figures, *, system: str = ""):
        self._session = ChatSession(llm, params, system=system)
        self._max_tokens = params.max_tokens
        self._max_model_len = llm.engine.config.max_model_len or 0
        self._figures = figures

    def run(self) -> None:
        if is_terminal := sys.stdin.isatty():
            _use_line_editing()
            note(f"Context: {self._max_model_len:,} tokens. Ctrl-C stops an answer, Ctrl-D leaves; see /help.")
        while True:
            try:
                line = input("> " if is_terminal else "").strip()
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
            output = print_stream(self._session.ask(text))
        except KeyboardInterrupt:
            output = None
        except JaxLLMError as error:
            note(f"error: {error}")
            note("[the message was left out of the conversation; /reset begins a new one]")
            return
        print(flush=True)
        if output is None:
            note("[stopped]")
            return
        self._figures.add([output], time.perf_counter() - start)
        if output.outputs[0].finish_reason == "length":
            note(self._why_cut_off(output))

    def _why_cut_off(self, output: RequestOutput) -> str:
        if len(output.prompt_token_ids) + len(output.outputs[0].token_ids) < self._max_model_len:
            return f"[cut off by --max-tokens {self._max_tokens}]"
        return (
            f"[cut off: the context of {self._max_model_len:,} tokens is full. /reset begins a new "
            "conversation; --max-model-len at the start may give it more room]"
        )


def _use_line_editing() -> None:
    """Arrow keys and history for `input`, where Python has them."""
    try:
        import readline  # noqa: F401
    except ImportError:  # Windows
        return
