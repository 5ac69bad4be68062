"""A conversation with a model."""

from contextlib import closing

from jaxllm.server.commands.answer import AnswerStream, AnswerTo, Message


class ChatSession:
    """Remembers what was said. Nothing is ever trimmed: what does not fit into the context is refused.

    answer_to: the model, here or at a server.
    system: what the model is told before the conversation; takes effect with the next answer.
    """

    def __init__(self, answer_to: AnswerTo, *, system: str = ""):
        self.system = system
        self._answer_to = answer_to
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation as the chat template gets it."""
        return [{"role": "system", "content": self.system}] * bool(self.system) + self._turns

    def ask(self, text: str) -> AnswerStream:
        """The answer, piece by piece.

        Closing the generator stops the answer; what has come of it stays in the conversation. If nothing has,
        the question is taken back too, as it is when the answer fails.

        Raises JaxLLMError: the conversation does not fit into the context, or not the chat template, or the server
        does not answer.
        """
        question = {"role": "user", "content": text}
        answer = {"role": "assistant", "content": ""}
        self._turns += [question, answer]
        is_kept = False
        try:
            result = yield from _collect(self._answer_to(self.messages[:-1]), answer)
            is_kept = True
            return result
        except (GeneratorExit, KeyboardInterrupt):
            is_kept = bool(answer["content"])
            raise
        finally:
            if not is_kept:
                del self._turns[-2:]

    def reset(self) -> None:
        """Forgets what was said, but not the system text."""
        self._turns.clear()


def _collect(stream: AnswerStream, message: Message) -> AnswerStream:
    """Passes the pieces on and appends them to the message."""
    with closing(stream):
        while True:
            try:
                piece = next(stream)
            except StopIteration as end:
                return end.value
            message["content"] += piece
            yield piece
