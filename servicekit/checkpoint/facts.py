"""The facts of a model's tokens that all services of a pool must hold alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from contract.domain.errors import broken
from servicekit.checkpoint.model import CONFIG, Checkpoint

if TYPE_CHECKING:  # a worker that has a real model does without
    from servicekit.checkpoint.tokenizer import TokenizerFiles

_WIDTHS = ("hidden_size", "n_embd", "d_model")  # as families call it


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of a model."""

    vocab_size: int  # ids are below it
    eos_token_ids: tuple[int, ...]  # ascending
    context_length: int  # tokens, prompt and output together
    hidden_size: int = 0  # dimensions of its hidden states; 0: not known


def model_facts(
    checkpoint: Checkpoint,
    text: "TokenizerFiles | None",
    *,
    max_model_len: int | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> ModelFacts:
    """The facts of a model and its tokenizer.

    Args:
        checkpoint: of the model.
        text: its tokenizer's files; None: it comes without.
        max_model_len: context that is wanted, in tokens; None: what the model has.
        generation_config: of a file that counts before the model's own.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `max_model_len`, which the model does not reach; INTERNAL (operator):
            the checkpoint does not say what it must, or makes no sense.
    """
    vocab_size = checkpoint.text_field("vocab_size")
    if not vocab_size and text is not None:
        vocab_size = text.tokenizer.get_vocab_size(with_added_tokens=True)
    if type(vocab_size) is not int or vocab_size < 1:
        raise broken(f"{checkpoint.directory / CONFIG}: vocab_size must be a positive integer, got {vocab_size!r}")
    eos = _stated_eos(checkpoint, generation_config or {})
    if text is not None and "eos_token" in text.special_tokens:
        eos.append(text.tokenizer.token_to_id(text.special_tokens["eos_token"]))
    return ModelFacts(
        vocab_size,
        # An id that the model has no logit for cannot end anything.
        tuple(sorted({each for each in eos if each is not None and 0 <= each < vocab_size})),
        checkpoint.context_length(max_model_len),
        hidden_size(checkpoint),
    )


def hidden_size(checkpoint: Checkpoint) -> int:
    """Dimensions of a model's hidden states; 0: its files do not say it."""
    stated = next((value for name in _WIDTHS if (value := checkpoint.text_field(name)) is not None), None)
    return stated if type(stated) is int and stated > 0 else 0


def _stated_eos(checkpoint: Checkpoint, generation_config: Mapping[str, Any]) -> list[int | None]:
    """As the last file says that does; what it has as null it does not say."""
    for stated in (
        generation_config.get("eos_token_id"),
        checkpoint.generation_config.get("eos_token_id"),
        checkpoint.text_field("eos_token_id"),
    ):
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if not all(each is None or type(each) is int for each in ids):
            raise broken(
                f"{checkpoint.directory}: eos_token_id must be a token id or a list of them, got {stated!r:.80}"
            )
        return list(ids)
    return []
