"""Command line options made from the fields of a dataclass, which alone names and explains them."""

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from jaxllm.server.commands.terminal import as_text

_ENTRY = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_options(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    title: str,
    defaults: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Adds `--field-name` for each field of `cls`; `options_from` finds what was given.

    An option that is not given is not set, so that the default of the dataclass holds, unless `defaults` has
    another. Options of a list may be given several times. A number that may be None takes the word "none".
    """
    group = parser.add_argument_group(title)
    docs, hints, defaults = field_docs(cls), get_type_hints(cls), defaults or {}
    order = list(docs)
    for field in sorted(fields(cls), key=lambda field: order.index(field.name)):
        if field.name in leave_out:
            continue
        default = defaults.get(field.name, field.default)
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"{cls.__name__}.{field.name}",
            default=defaults.get(field.name, argparse.SUPPRESS),
            help=(docs[field.name] + shown).replace("%", "%%"),
            **_reading(hints[field.name]),
        )


def options_from(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of `cls` that were given, or that `add_options` has a default for."""
    given = vars(args)
    names = {field.name: f"{cls.__name__}.{field.name}" for field in fields(cls)}
    return {name: given[dest] for name, dest in names.items() if dest in given}


def field_docs(cls: type) -> dict[str, str]:
    """What the source says about each field: the string after it, or "name: text" in the docstring. The fields of the
    class itself come before those that it inherits."""
    docs: dict[str, str] = {}
    for owner in filter(is_dataclass, cls.__mro__):
        docs |= {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(owner) or "")}
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def text(given: str) -> str:
    """The `type` of an argument that is text; those that are not may be names of files, which need not be."""
    try:
        return as_text(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not UTF-8") from None


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    choices = get_args(hint) or (hint,)
    item_types = [get_args(choice)[0] for choice in choices if get_origin(choice) is Sequence]
    if item_types:
        (kind,) = item_types
        return {"action": "append", "type": text if kind is str else kind, "metavar": _METAVARS[kind]}
    (kind,) = (choice for choice in choices if choice is not NoneType)
    is_optional_number = kind is not str and NoneType in choices
    return {"type": _or_none(kind) if is_optional_number else kind, "metavar": _METAVARS[kind]}


def _or_none(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it when a value is refused.
    return read
