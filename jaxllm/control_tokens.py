"""Control tokens in what people write are text, and only those of the chat template are control tokens."""

import re
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ControlTokens:
    """Those of a tokenizer, such as `<|im_end|>`: they end turns and say who speaks.

    A text that is tokenized in two parts is no control token. So where somebody has written one, the conversation is
    cut after its first character:

        parts = control_tokens.parts(lambda messages: template.render(messages=messages), messages)
        token_ids = [token_id for part in parts for token_id in encode(part)]
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        tokens = sorted((token.content for token in tokenizer.added_tokens_decoder.values() if token.special), key=len)
        self._pattern = re.compile("|".join(map(re.escape, reversed(tokens)))) if tokens else None

    def parts(self, render: Callable[..., str], *values: Any) -> list[str]:
        """`render(*values)` in parts, each to be tokenized for itself; joined, they are the whole.

        Args:
          render: puts together the template's text and the values'.
          values: what people have written: texts, also in lists and mappings, as keys too.
        """
        cut = secrets.token_hex(16)  # which nobody can have written
        return render(*(self._with_cuts(value, cut) for value in values)).split(cut)

    def _with_cuts(self, value: Any, cut: str) -> Any:
        match value:
            case str() if self._pattern is not None:
                return self._pattern.sub(lambda found: f"{found[0][0]}{cut}{found[0][1:]}", value)
            case Mapping():
                return {self._with_cuts(key, cut): self._with_cuts(item, cut) for key, item in value.items()}
            case list() | tuple():
                return [self._with_cuts(item, cut) for item in value]
        return value
