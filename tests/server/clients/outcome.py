"""What each program of this folder tells of its tool loops: a line of JSON for each."""

import json

_asked: list[str] = []


def asked(city: str) -> str:
    """Tells the temperature of a city.

    Args:
        city: its name.
    """
    _asked.append(city)
    return "21 degrees"


def report(way: str, answer: str) -> None:
    """The arguments of the tool's calls since the last report, and the answer at the end."""
    print(json.dumps({"way": way, "cities": _asked, "answer": answer}), flush=True)
    _asked.clear()
