"""Several generations on behalf of one HTTP request."""

from collections.abc import Callable, Sequence

from jaxllm import OutputDelta
from jaxllm.server.api.generation.generation import Generation


class GenerationGroup:
    """A source of the deltas of all (`deltas.DeltaSource`).

    The index of a delta counts the choices of all, those of the first generation first; all have as many. When one
    fails, the others are ended.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations

    @property
    def num_choices(self) -> int:
        return sum(generation.num_choices for generation in self._generations)

    @property
    def is_complete(self) -> bool:
        return all(generation.is_complete for generation in self._generations)

    def listen(self, on_news: Callable[[], None]) -> None:
        for generation in self._generations:
            generation.listen(on_news)

    def take(self) -> OutputDelta | None:
        try:
            for number, generation in enumerate(self._generations):
                if (delta := generation.take()) is not None:
                    delta.index += number * generation.num_choices
                    return delta
        except Exception:
            self.close()
            raise
        return None

    def close(self) -> None:
        for generation in self._generations:
            generation.close()
