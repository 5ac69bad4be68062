"""Finding the texts that end a request, in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches one request's text for its stop strings.

    The stop string that is complete first ends the text; of several complete at the same character, the
    longest. Where the text is cut into pieces makes no difference. What may be the beginning of a stop string
    is held back until it is known not to be.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool) -> None:
        self._stop = tuple(stop)
        self._max_held_len = max(map(len, self._stop), default=1) - 1
        self._include_stop_str_in_output = include_stop_str_in_output
        self._held = ""

    def append(self, text: str) -> tuple[str, str | None]:
        """Returns the text that may be shown now, and the stop string if one is found; that is the end."""
        known = self._held + text
        for end in range(len(self._held) + 1, len(known) + 1):
            if known.endswith(self._stop, 0, end):
                found = max((stop for stop in self._stop if known.endswith(stop, 0, end)), key=len)
                self._held = ""
                return known[: end if self._include_stop_str_in_output else end - len(found)], found
        shown = max(len(known) - self._max_held_len, 0)
        while shown < len(known) and not self._may_begin(known[shown:]):
            shown += 1
        self._held = known[shown:]
        return known[:shown], None

    def finish(self) -> str:
        """Returns the text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)
