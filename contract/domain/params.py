"""The parameters of a request, split by who reads it: worker (sampling), scheduler (stopping), detokenizer (text)."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Final

from contract.domain.beams import ALONE, BESIDE_BEAMS, MAX_BEAMS, BeamSearch
from contract.domain.errors import invalid
from contract.domain.parameter import (
    I64_END,
    U32_END,
    Biases,
    Column,
    Field,
    Filled,
    Flag,
    FlagOrWord,
    Integer,
    Number,
    Parameter,
    Part,
    Strings,
    TokenIds,
    Word,
)
from contract.domain.repetition import Repetition, RepetitionDetectionParams
from contract.domain.structured_outputs import Structured, StructuredOutputsParams

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_SUPPRESS_TOKENS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 32
AS_FITS = -1  # of `truncate_prompt_tokens`: those tokens of the prompt that fit
MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class Made:
    """The fields of `Sampling` that a tokenizer makes of what was asked, since it knows the vocabulary."""

    # Of each the last is not sampled where the output ends with the others: `bad_words`.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    thinking_token_ids: tuple[int, ...] = ()  # those that open and close a thought, where its length is bounded
    grammar: str = ""  # of the whole output, in llguidance's form: `structured_outputs`; empty: it may have any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Made):
    """The worker's part: how one token is drawn from the logits.

    Applied in this order: repetition, presence and frequency penalty, logit bias, which tokens may come, temperature,
    top-k, top-p, min-p.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), each id once
    num_logprobs: int | None = None  # None: no logprobs; 0: the sampled token's; k: and the k most likely
    num_prompt_logprobs: int | None = None  # likewise, of each token of the prompt but the first
    logprob_token_ids: tuple[int, ...] = ()  # of these instead of the k most likely, ascending
    suppress_token_ids: tuple[int, ...] = ()  # never sampled, whatever their bias
    allowed_token_ids: tuple[int, ...] | None = None  # no others are sampled; None: all may be
    thinking_token_budget: int | None = None  # tokens of a thought, then it is closed; None: as many as it takes

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is taken, whatever the seed."""
        return self.temperature == 0.0

    def having(self, made: Made) -> "Sampling":
        """The same with what a tokenizer made."""
        return replace(self, **{each.name: getattr(made, each.name) for each in fields(Made)})


@dataclass(frozen=True, slots=True)
class Stopping:
    """The scheduler's part: when a sequence ends by its tokens."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # EOS and stop ids cannot be sampled before
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_detection: RepetitionDetectionParams | None = None  # None: it may repeat itself


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The detokenizer's part: how tokens become text and which strings end it."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # false: no token has a text


SAMPLING, STOPPING, TEXT, FLOATS, INTEGERS = Part.SAMPLING, Part.STOPPING, Part.TEXT, Column.FLOATS, Column.INTEGERS
_SHARE = Number(0.0, 1.0)
_PENALTY = Number(-MAX_PENALTY, MAX_PENALTY)
_TO_100 = Number(0.0, 100.0, open_low=True)
_BIASES = Biases(MAX_LOGIT_BIAS, Number(-100.0, 100.0))
_STOPS = Strings(MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS, "stop string", may_be_one=True)
_STOP_IDS = TokenIds(MAX_STOP_TOKEN_IDS, "at most {most} stop token ids")
_BAD_WORDS = Strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS, "bad word")
# With these there might be no token left, or none that may end the output.
_NOT_BESIDE_A_FORM = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "suppress_tokens")
_GREEDY_OR_UNSAID = (0.0, 1.0)
_ALLOWED = TokenIds(MAX_ALLOWED_TOKEN_IDS, is_set=True, may_be_empty=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of generation for one prompt; every field is checked when the object is made.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    # The table of parameters. A line: type; kind with its bounds; who reads it; its column in the worker, whether a
    # model may have a default of its own, and the name in messages if it is another; what it means; the default.
    n: Annotated[int, Integer(1, MAX_N), Part.REQUEST, "samples of each prompt"] = 1
    temperature: Annotated[float, Number(0.0, 100.0), SAMPLING, FLOATS, Filled(), "0 takes the likeliest token"] = 1.0
    top_p: Annotated[
        float,
        Number(0.0, 1.0, open_low=True),
        SAMPLING,
        FLOATS,
        Filled(),
        "the likeliest tokens that have this together",
    ] = 1.0
    top_k: Annotated[
        int, Integer(-1, U32_END - 1, 0), SAMPLING, INTEGERS, Filled(), "the k likeliest tokens; 0 or -1: all"
    ] = 0
    min_p: Annotated[float, _SHARE, SAMPLING, FLOATS, Filled(), "tokens with this share of the likeliest"] = 0.0
    repetition_penalty: Annotated[float, _TO_100, SAMPLING, FLOATS, Filled(), "of tokens in prompt or output"] = 1.0
    presence_penalty: Annotated[float, _PENALTY, SAMPLING, FLOATS, "of tokens in the output"] = 0.0
    frequency_penalty: Annotated[float, _PENALTY, SAMPLING, FLOATS, "of tokens, each time they are in the output"] = 0.0
    logit_bias: Annotated[
        Mapping[int, float] | None, _BIASES, SAMPLING, "token id in decimal → what is added to its logit"
    ] = field(default_factory=dict, hash=False)
    seed: Annotated[
        int | None,
        Integer(-I64_END, I64_END - 1),
        Part.REQUEST,
        "signed 64-bit integer; without one it is drawn, or follows from the `Idempotency-Key`",
    ] = None
    max_tokens: Annotated[
        int | None,
        Integer(1, U32_END - 1),
        STOPPING,
        Filled("max_new_tokens"),
        "output tokens at most; by default of a chat what the context leaves",
    ] = 16
    min_tokens: Annotated[
        int, Integer(0, U32_END - 1), STOPPING, "output tokens before an end token can be sampled"
    ] = 0
    stop: Annotated[str | Sequence[str] | None, _STOPS, TEXT, "texts that end the output"] = field(
        default=(), hash=False
    )
    stop_token_ids: Annotated[Sequence[int] | None, _STOP_IDS, STOPPING, "tokens that end the output"] = field(
        default=(), hash=False
    )
    ignore_eos: Annotated[bool, Flag(), STOPPING, "go on after the model's end token"] = False
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        Repetition(),
        STOPPING,
        "an output ends, with the finish reason `repetition`, that has a pattern of `min_pattern_size` to "
        "`max_pattern_size` tokens `min_count` times in a row",
    ] = None
    logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        SAMPLING,
        Field("num_logprobs"),
        "so many of the likeliest tokens beside the sampled one; of a chat true or false, with `top_logprobs`",
    ] = None
    logprob_token_ids: Annotated[
        Sequence[int] | None,
        TokenIds(MAX_LOGPROB_TOKEN_IDS, is_set=True),
        SAMPLING,
        "beside `logprobs`: those of these tokens at each place instead of the likeliest ones'",
    ] = field(default=(), hash=False)
    prompt_logprobs: Annotated[
        int | None,
        Integer(0, MAX_LOGPROBS),
        SAMPLING,
        Field("num_prompt_logprobs"),
        "of each token of the prompt but the first: its logprob and those of so many of the likeliest",
    ] = None
    skip_special_tokens: Annotated[bool, Flag(), TEXT, "special tokens have no text"] = True
    include_stop_str_in_output: Annotated[bool, Flag(), TEXT, "the stop string is part of the text"] = False
    detokenize: Annotated[bool, Flag(), TEXT, "tokens become text; where not, the text is empty"] = True
    suppress_tokens: Annotated[
        Sequence[int] | None,
        TokenIds(MAX_SUPPRESS_TOKENS, is_set=True),
        SAMPLING,
        Field("suppress_token_ids"),
        Filled(),
        "tokens that are never sampled",
    ] = field(default=(), hash=False)
    allowed_token_ids: Annotated[Sequence[int] | None, _ALLOWED, SAMPLING, "no other tokens are sampled"] = field(
        default=None, hash=False
    )

    thinking_token_budget: Annotated[
        int | None,
        Integer(0, U32_END - 1),
        SAMPLING,
        "tokens of the output that a thought may have: then the token comes that closes it",
    ] = None
    bad_words: Annotated[
        Sequence[str] | None,
        _BAD_WORDS,
        Part.REQUEST,
        "words that are not generated: in their tokens, and in those after a space if as many, as vLLM has it",
    ] = field(default=(), hash=False)
    use_beam_search: Annotated[
        bool, Flag(), Part.REQUEST, "[beam search](#beam-search): the `n` best outputs are found together"
    ] = False
    length_penalty: Annotated[
        float,
        Number(-5.0, 5.0),
        Part.REQUEST,
        "beside `use_beam_search`: scores are sums of logprobs divided by the number of tokens to this power",
    ] = 1.0
    early_stopping: Annotated[
        bool | str,
        FlagOrWord("never"),
        Part.REQUEST,
        "beside `use_beam_search`, once `n` outputs are finished: true ends the search at once, false when the best "
        "beam has no better score now, `never` when none can get one",
    ] = False
    truncate_prompt_tokens: Annotated[
        int | None,
        Integer(-1, U32_END - 1),
        Part.REQUEST,
        "the last so many tokens of the prompt count; -1: as many as leave room for `max_tokens`, or for one token",
    ] = None
    truncation_side: Annotated[
        str | None,
        Word(("left", "right")),
        Part.REQUEST,
        "beside `truncate_prompt_tokens`, the side at which tokens of the prompt are left out; `right`: the first ones "
        "count; by default `left`",
    ] = None
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Structured(),
        Part.REQUEST,
        "the form of the output: [one of several](#structured-outputs)",
    ] = None

    def __post_init__(self) -> None:
        for each in PARAMETERS.values():
            each.check(getattr(self, each.name))
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens must be -1 or at least 1, got 0", "truncate_prompt_tokens")
        if self.stop and not self.detokenize:
            raise invalid("stop needs detokenize: without text nothing can stop it; stop_token_ids can", "stop")
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid("logprob_token_ids needs logprobs, whose number does not count then", "logprob_token_ids")
        if self.structured_outputs is not None and (also := next(filter(self._says, _NOT_BESIDE_A_FORM), None)):
            raise invalid(f"{also} and structured_outputs exclude each other: the form alone says what may come", also)
        self._check_beams()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens")

    def _check_beams(self) -> None:
        others = (name for name in PARAMETERS if name not in BESIDE_BEAMS)
        if not self.use_beam_search:
            if also := next((name for name in ALONE if self._asks(name)), None):
                raise invalid(f"{also} is for use_beam_search", also)
        elif also := next(filter(self._asks, others), None):
            raise invalid(f"{also} cannot be asked for beside use_beam_search", also)
        elif self.temperature not in _GREEDY_OR_UNSAID:
            raise invalid("beside use_beam_search nothing is drawn: temperature must be 0 or left out", "temperature")
        elif self.n > MAX_BEAMS:
            raise invalid(f"n must be at most {MAX_BEAMS} beside use_beam_search, got {self.n}", "n")

    @property
    def beams(self) -> BeamSearch | None:
        """The search of beams, where one is asked for."""
        return BeamSearch(self.length_penalty, self.early_stopping) if self.use_beam_search else None

    @property
    def tells_logprobs(self) -> bool:
        """Return whether outputs come with logprobs: those of beams do, since they are chosen by them."""
        return self.logprobs is not None or self.use_beam_search

    @property
    def sampling(self) -> Sampling:
        """The worker's part."""
        return Sampling(**self._part(SAMPLING))

    @property
    def stopping(self) -> Stopping:
        """The scheduler's part."""
        return Stopping(**self._part(STOPPING))

    @property
    def text(self) -> TextOptions:
        """The detokenizer's part."""
        return TextOptions(**self._part(TEXT))

    def _says(self, name: str) -> bool:
        return bool(getattr(self, name))

    def _asks(self, name: str) -> bool:
        """Return whether a parameter is not as it is by default."""
        line = PARAMETERS[name]
        return bool(line.kind.read(getattr(self, name)) != line.kind.read(line.default))

    def _part(self, part: Part) -> dict[str, Any]:
        return {each.field: each.kind.read(getattr(self, each.name)) for each in PARTS[part]}


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


# The lines by their names, and by who reads them.
PARAMETERS: Final[Mapping[str, Parameter]] = {
    each.name: Parameter.declared(each.name, each.type, _default(each)) for each in fields(SamplingParams)
}
PARTS: Final = {part: tuple(each for each in PARAMETERS.values() if each.part is part) for part in Part}
