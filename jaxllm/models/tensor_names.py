"""The names that tensors have in checkpoints, and those in our tables: "model.layers.0.…" and "lm_head.weight".

Through the years transformers has put other things before the names of the text model: nothing where only the base
model was saved, and two orders of "model" and "language_model" where it is a part of a multimodal model.
"""

from collections.abc import Callable, Set

BODY = "model."
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_BODIES = (BODY, "model.language_model.", "language_model.model.", "language_model.", "model.language_model.model.", "")
_HEADS = (HEAD, "language_model.lm_head.weight", "model.language_model.lm_head.weight")

OTHER_PARTS = tuple(
    f"{before}{part}." for before in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
"""Before the tensors of a multimodal model that text does not need."""


def stored_name(present: Set[str]) -> Callable[[str], str]:
    """From a name in our tables to that in a checkpoint with tensors of the names `present`."""
    body = next((body for body in _BODIES if EMBEDDING.replace(BODY, body, 1) in present), BODY)
    head = next((head for head in _HEADS if head in present), HEAD)
    return lambda name: head if name == HEAD else body + name.removeprefix(BODY)
