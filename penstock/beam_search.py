"""Beam search as vLLM's `LLM.beam_search` has it: its parameters and outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.domain.params import SamplingParams
from penstock.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a search.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    beam_width: int  # beams, and outputs of each prompt
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # nothing is drawn
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False  # the token that ended an output is part of it
    early_stopping: bool | str = False  # see `SamplingParams`

    def __post_init__(self) -> None:
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same for `LLM.generate`."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One output."""

    tokens: list[int]  # of the prompt and, after it, of the output
    logprobs: list[dict[int, Logprob]]  # of each token of the output and of that which ended it, by its id
    cum_logprob: float  # their sum
    text: str  # of all of them, special tokens included
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The outputs of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def beam_output(
    output: RequestOutput, params: BeamSearchParams, decode: Callable[[Sequence[int]], str]
) -> BeamSearchOutput:
    """The outputs of a request; `decode` makes text of tokens."""

    def sequence(sample: CompletionOutput) -> BeamSearchSequence:
        is_hidden = sample.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + list(sample.token_ids[: -1 if is_hidden else None])
        return BeamSearchSequence(
            tokens,
            sample.logprobs or [],
            sample.cumulative_logprob or 0.0,
            decode(tokens),
            sample.finish_reason,
            sample.stop_reason,
        )

    return BeamSearchOutput([sequence(sample) for sample in output.outputs])
