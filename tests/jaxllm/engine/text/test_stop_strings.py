import itertools
import random

import pytest

from jaxllm.engine.text.stop_strings import StopStrings


def feed(pieces, stop, *, include=False) -> tuple[str, str | None, list[str]]:
    """Returns the text, the stop string found, and the text as it was shown."""
    stop_strings = StopStrings(stop, include_stop_str_in_output=include)
    shown = []
    for piece in pieces:
        text, found = stop_strings.append(piece)
        shown.append(text)
        if found is not None:
            assert stop_strings.finish() == ""
            return "".join(shown), found, shown
    shown.append(stop_strings.finish())
    return "".join(shown), None, shown


def by_definition(text, stop, *, include=False) -> tuple[str, str | None]:
    """The stop string that is complete first; of those complete at the same character, the longest."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            found = max(complete, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


def every_cut(text):
    for cuts in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for end in [*(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]:
            pieces.append(text[start:end])
            start = end
        yield pieces


CASES = [
    ("hello END world", ["END"]),
    ("hello EN", ["END"]),
    ("EENEND", ["END"]),
    ("aaab", ["aab"]),
    ("abcabd", ["abcabx", "bca"]),
    ("xabcd", ["abcd", "bc"]),
    ("xabc", ["bc", "abc", "c"]),
    ("a\n\nb", ["\n\n", "\n"]),
    ("日本語😀。", ["語😀", "。"]),
    ("no stop", []),
    ("", ["a"]),
    ("stop", ["stop"]),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("text", "stop"), CASES)
def test_every_way_to_cut_the_text_gives_the_same(text, stop, include):
    expected = by_definition(text, stop, include=include)
    for pieces in every_cut(text):
        assert feed(pieces, stop, include=include)[:2] == expected


def test_random_texts_and_cuts_follow_the_definition():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(14)))
        stop = ["".join(rng.choices("ab", k=rng.randrange(3, 8))) for _ in range(rng.randrange(4))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8)))  # repeated ones make empty pieces
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        include = rng.random() < 0.5
        assert feed(pieces, stop, include=include)[:2] == by_definition(text, stop, include=include)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    assert feed("a<|en<|end|>b", ["<|end|>"])[2] == ["a", "", "", "", "<|en"[:0], "<|en", *[""] * 6]
    assert feed(["x", "y", "z"], ["END"])[2] == ["x", "y", "z", ""]
    assert feed(["ab"], ["abc", "bd"])[2] == ["", "ab"]


def test_the_text_after_a_stop_string_is_dropped():
    assert feed(["one STOP two STOP"], ["STOP"])[:2] == ("one ", "STOP")
    assert feed(["one STOP two STOP"], ["STOP"], include=True)[:2] == ("one STOP", "STOP")
