"""Tokens of a step and sequences at once, where nobody says."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that a worker is made for."""

    max_num_batched_tokens: int
    max_num_seqs: int
    num_saved_states: int = 0  # where layers keep one


# Where nothing is known of the device.
DEFAULT_SIZES = StepSizes(max_num_batched_tokens=2048, max_num_seqs=256)

_TOKENS = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Sequences that decode wait for a step with a prompt: for longer than that, clients see it. Of shorter steps, what each
# costs besides its tokens is a larger part.
_STEP_S = 0.036
_EFFICIENCY = 0.62  # of a device's peak: prompts of Qwen3-8B on an H200
_TOKENS_OF_A_SEQUENCE = 128  # for which there is KV at least when all slots are taken
_SEQS_STEP = 16  # by so many sequences decode steps are recorded
_MANY = 16_384  # tokens
_FEWEST_BETWEEN = 64  # tokens: steps of fewer have kernels that are recorded, where graphs are

# bf16 and fp16 operations a second of one multiprocessor, dense, by compute capability: data sheets.
_FLOPS_PER_S = {
    (8, 0): 2.9e12,
    (8, 6): 0.9e12,
    (8, 9): 1.3e12,
    (9, 0): 7.5e12,
    (10, 0): 15e12,
    (10, 3): 15e12,
    (12, 0): 1.2e12,
}


def peak_flops_per_s(capability: tuple[int, int], num_multiprocessors: int) -> float | None:
    """Of a GPU, in half precision; None: it is not known."""
    per_multiprocessor = _FLOPS_PER_S.get(capability)
    return None if per_multiprocessor is None else per_multiprocessor * num_multiprocessors


def choose_step_sizes(
    num_layer_weights: int,
    flops_per_s: float | None,
    kv_bytes: int | None,
    token_bytes: int,
    most_states: int | None = None,
) -> StepSizes:
    """The sizes for a rank.

    Args:
        num_layer_weights: that this rank multiplies a token with.
        flops_per_s: peak of its device; None: not known.
        kv_bytes: what there is for KV, roughly; None: it is said in blocks, and sequences with it.
        token_bytes: KV of one token.
        most_states: slots for whose states there is memory; None: layers keep none.
    """
    num_tokens = DEFAULT_SIZES.max_num_batched_tokens
    if flops_per_s is not None:
        affordable = _STEP_S * _EFFICIENCY * flops_per_s / (2 * num_layer_weights)
        num_tokens = max((size for size in _TOKENS if size <= affordable), default=_TOKENS[0])
    num_seqs = DEFAULT_SIZES.max_num_seqs
    if kv_bytes is not None:
        held = kv_bytes // (token_bytes * _TOKENS_OF_A_SEQUENCE)
        num_seqs = min(num_seqs, _whole_steps(held))
    if most_states is not None:
        num_seqs = min(num_seqs, _whole_steps(most_states))
    return StepSizes(num_tokens, num_seqs)


def sizes_between(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens, fewer than a step may have, of which steps have all kernels that steps of any number use from
    the smallest of them on: none is for less than a quarter more tokens than it begins with, or twice as many of many.
    """
    sizes, size = [], _FEWEST_BETWEEN
    while size < max_num_batched_tokens:
        sizes.append(size)
        size = size * 5 // 4 if size < _MANY else size * 2
    return sizes


def _whole_steps(num_seqs: int) -> int:
    return max(_SEQS_STEP, num_seqs // _SEQS_STEP * _SEQS_STEP)
