"""Beam search as a request asks for it, and what may stand beside it."""

from dataclasses import dataclass
from typing import Final

MAX_BEAMS: Final = 16
MAX_CANDIDATES: Final = 20  # tokens of which a worker tells the logprobs: those of a beam, and as many as may end it

# Parameters that ask for something beside beams alone.
ALONE: Final = ("length_penalty", "early_stopping")
# Those that keep their meaning beside them: all others change logits, tell logprobs or need a text before the end.
BESIDE_BEAMS: Final = frozenset(
    {"n", "temperature", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"}
    | {"detokenize", "skip_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens", "truncation_side"}
    | {"use_beam_search", *ALONE}
)
FILLED_BESIDE_BEAMS: Final = frozenset({"max_tokens"})  # the defaults of a model that hold: others are of drawing


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A search of the outputs with the best scores: sums of logprobs / number of tokens ** `length_penalty`."""

    length_penalty: float = 1.0
    early_stopping: bool | str = False  # as `SamplingParams` has it
