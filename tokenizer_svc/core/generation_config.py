"""The parameters of a generation_config.json, for requests that leave them open."""

from typing import Any, Final

from contract.domain.errors import PenstockError, broken
from contract.domain.generation_defaults import FILLED, GenerationDefaults

# What else transformers generates by, and the values that ask for nothing. `do_sample` is not among it: whether a
# token is drawn is said by the temperature alone, as in OpenAI's API and in vLLM. Base models whose file says false
# would else answer several samples with one text.
_NOT_DONE: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "sequence_bias", "force_words_ids"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("min_new_tokens", "stop_strings", "guidance_scale"), (0, 1, [])),
}


def generation_defaults(config: dict[str, Any], vocab_size: int) -> GenerationDefaults:
    """The parameters that hold where a request does not say otherwise.

    Args:
        config: of a generation_config.json; what it has as null it does not say.
        vocab_size: of the model, which has no logits of tokens beyond it.

    Raises:
        PenstockError: INTERNAL (operator): a value is out of bounds.
    """
    suppressed = config.get("suppress_tokens")
    if suppressed is not None and not (isinstance(suppressed, list) and all(type(each) is int for each in suppressed)):
        raise _wrong(f"suppress_tokens must be a list of token ids, got {suppressed!r:.80}")
    within = tuple(sorted({token_id for token_id in suppressed or () if 0 <= token_id < vocab_size}))
    if len(within) >= vocab_size:
        raise _wrong("suppress_tokens leaves no token")
    said = {name: config.get(each.filled or name) for name, each in FILLED.items()}
    said |= {"top_k": _count(said["top_k"]), "suppress_tokens": within or None}
    try:
        return GenerationDefaults(**said)
    except PenstockError as error:
        raise _wrong(error.message) from error


def not_done(config: dict[str, Any]) -> list[str]:
    """Names of what the file asks for and nothing here does."""
    return [
        name
        for name, neutral in _NOT_DONE.items()
        if (value := config.get(name)) is not None and value is not False and value not in neutral
    ]


def _count(top_k: Any) -> Any:
    """Both 0 and -1 keep all tokens."""
    return max(top_k, 0) if type(top_k) is int and top_k >= -1 else top_k


def _wrong(why: str) -> PenstockError:
    return broken(
        f"the generation_config.json that counts cannot be used: {why}; mend it, or set --generation-config to openai "
        "or to a directory with another"
    )
