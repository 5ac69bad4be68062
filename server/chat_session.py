"""A conversation with a model."""

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from jaxllm import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxllm import LLM


class ChatSession:
    """Remembers what was said. Nothing is ever trimmed: what does not fit into the context is refused.

    system: what the model is told before the conversation; takes effect with the next answer.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, *, system: str = ""):
        self.system = system
        self._llm = llm
        self._params = params
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template gets it."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self._turns

    def ask(self, text: str) -> Generator[str, None, RequestOutput]:
        """The answer, piece by piece.

        Closing the generator stops the answer; what has come of it stays in the conversation. If nothing has,
        the question is taken back too, as it is when it is refused.

        Raises InvalidRequestError: the conversation does not fit into the context, or not the chat template.
        """
        question = {"role": "user", "content": text}
        answer = {"role": "assistant", "content": ""}
        self._turns += [question, answer]
        has_ended = False
        try:
            stream = self._llm.stream(self.messages[:-1], self._params)
            output = yield from _collect(stream, answer)
            has_ended = True
            return output
        finally:
            if not (has_ended or answer["content"]):
                del self._turns[-2:]

    def reset(self) -> None:
        """Forgets what was said, but not the system text."""
        self._turns.clear()


def _collect(
    stream: Generator[str, None, RequestOutput], message: dict[str, str]
) -> Generator[str, None, RequestOutput]:
    """Passes the pieces on and appends them to the message."""
    with closing(stream):
        while True:
            try:
                piece = next(stream)
            except StopIteration as end:
                return end.value
            message["content"] += piece
            yield piece
