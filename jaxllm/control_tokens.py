"""Control tokens in what people write are text, and only those of the chat template are control tokens."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ControlTokens:
    """Those of a tokenizer, such as `<|im_end|>`: they end turns and say who speaks.

    Where somebody has written one, the conversation is cut after its first character. A part has no other control
    tokens than those of the template, and all parts are encoded as one text:

        parts = control_tokens.parts(lambda messages: template.render(messages=messages), messages)
        token_ids = control_tokens.encode(parts)
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._added = self._tokenizer.get_added_tokens_decoder()
        control = [token for token in self._added.values() if token.special]
        self._pattern = _pattern_of(control) if control else None
        # One that is looked for in normalized text may be written in ways that the pattern does not find.
        self._has_variants = any(token.normalized for token in control)

    def parts(self, render: Callable[..., str], *values: Any) -> list[str]:
        """`render(*values)` in parts, to be given to `encode`; joined, they are the whole.

        Args:
          render: puts together the template's text and the values'.
          values: what people have written: texts, also in lists and mappings, as keys too.
        """
        cut = str(secrets.randbits(128))  # which nobody can have written, and upper and lower case leave alone
        return render(*(self._with_cuts(value, cut) for value in values)).split(cut)

    def encode(self, parts: Sequence[str]) -> list[int]:
        """The token ids of the whole: those that the tokenizer would give if the control tokens that somebody has
        written were none. No others are added, such as one for the beginning. Safe in any thread; texts may be long."""
        if self._pattern is None or (len(parts) == 1 and not self._has_variants):
            return _encode(self._tokenizer, "".join(parts))
        renamed = self._renamed
        token_ids = _encode(renamed.tokenizer, "".join(renamed.pattern.sub(renamed.name_of, part) for part in parts))
        if not renamed.in_model.isdisjoint(token_ids):  # The model itself makes a control token of these characters.
            return [token_id for part in parts for token_id in _encode(self._tokenizer, part)]
        return [renamed.token_ids.get(token_id, token_id) for token_id in token_ids]

    @cached_property
    def _renamed(self) -> "_Renamed":
        """The same tokenizer, in which the control tokens have names that nobody can have written. It is made when
        first asked for, and shares the vocabulary."""
        original, prefix = self._tokenizer, secrets.randbits(128)
        renamed = Tokenizer(original.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(original, part)) is not None:
                setattr(renamed, part, value)
        names = {
            token.content: f"<{prefix}{token_id:09}>" if token.special else token.content
            for token_id, token in self._added.items()
        }
        tokens = sorted(self._added.items())
        renamed.add_tokens([_with_content(token, names[token.content]) for _, token in tokens])
        new_ids = {token.content: token_id for token_id, token in renamed.get_added_tokens_decoder().items()}
        return _Renamed(
            tokenizer=renamed,
            pattern=_pattern_of(self._added.values()),  # The others too: the longest that fits is found.
            name_of=lambda found: names[found[0]],
            token_ids={new_ids[names[token.content]]: token_id for token_id, token in tokens},
            in_model=frozenset(
                token_id
                for token_id, token in tokens
                if token.special and renamed.model.token_to_id(token.content) == token_id
            ),
        )

    def _with_cuts(self, value: Any, cut: str) -> Any:
        match value:
            case str() if self._pattern is not None:
                return self._pattern.sub(lambda found: f"{found[0][0]}{cut}{found[0][1:]}", value)
            case Mapping():
                return {self._with_cuts(key, cut): self._with_cuts(item, cut) for key, item in value.items()}
            case list() | tuple():
                return [self._with_cuts(item, cut) for item in value]
        return value


class _Renamed(NamedTuple):
    """tokenizer: with the new names.
    pattern: finds all added tokens under their old names.
    name_of: what stands for one that was found.
    token_ids: from its ids of added tokens to the original's.
    in_model: ids of control tokens that are in the vocabulary under their old names.
    """

    tokenizer: Tokenizer
    pattern: re.Pattern[str]
    name_of: Callable[[re.Match[str]], str]
    token_ids: dict[int, int]
    in_model: frozenset[int]


def _pattern_of(tokens: Any) -> re.Pattern[str]:
    """Finds the leftmost, and of these the longest, as the tokenizer does."""
    return re.compile("|".join(re.escape(text) for text in sorted((t.content for t in tokens), key=len, reverse=True)))


def _with_content(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # Of the tokenizer's calls, only those for batches let other threads run meanwhile.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids
