"""What is wrong with a body that Python's parser of JSON has given up, and where."""

import re

_MAX_DIGITS = 4300  # that Python makes an integer of
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"?|(?P<open>[\[{])|(?P<close>[\]}])|(?P<integer>-?\d+(?![\d.eE]))', re.DOTALL)


def json_fault(body: bytes) -> str:
    """For a person. It is slow, and for bodies that have failed only."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: the byte 0x{body[error.start]:02x} at index {error.start:,} is no part of a character"
    depth = deepest = place = 0
    for token in _TOKENS.finditer(body):
        if token["open"]:
            depth += 1
            if depth > deepest:
                deepest, place = depth, token.start()
        elif token["close"]:
            depth -= 1
        elif token["integer"] and (num_digits := len(token["integer"].lstrip(b"-"))) > _MAX_DIGITS:
            return f"the number at index {token.start():,} has {num_digits:,} digits; it may have {_MAX_DIGITS:,}"
    return f"it is nested {deepest:,} levels deep at index {place:,}, which is more than can be read"


def place_in(text: str, index: int) -> str:
    """Where an index is, as editors count."""
    line = text.count("\n", 0, index) + 1
    return f"line {line:,}, column {index - text.rfind(chr(10), 0, index):,}"
