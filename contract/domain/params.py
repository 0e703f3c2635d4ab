"""What a request asks for, split by who reads it: worker (sampling), scheduler (stopping), detokenizer (text)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from contract.domain.errors import invalid

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SUPPRESS_TOKENS = 1024
MAX_PENALTY = 2.0
_U32 = 2**32
_I64 = 2**63


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the worker reads: how one token is drawn from the logits.

    Applied in this order: repetition, presence and frequency penalty, logit bias, temperature, top-k, top-p, min-p.
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
    suppress_tokens: tuple[int, ...] = ()  # never sampled, whatever their bias

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is taken, whatever the seed."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Stopping:
    """What the scheduler reads: when a sequence ends by its tokens."""

    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # EOS and stop ids cannot be sampled before
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the detokenizer reads: how tokens become text and which strings end it."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


def _finite(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise invalid(f"{name} must be a number, got {value!r:.80}", name)
    value = float(value)
    outside = value <= low if open_low else value < low
    if not math.isfinite(value) or outside or value > high:
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise invalid(f"{name} must be in {bounds}, got {value!r}", name)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise invalid(f"{name} must be true or false, got {value!r:.80}", name)


def _list(name: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid(f"{name} must be a list, got {value!r:.80}", name)
    return value


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise invalid(f"{name} must be an integer in [{low}, {high}], got {value!r}", name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate for one prompt; every field is checked when the object is made.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the field that is out of bounds.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 keep every token
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = field(default=(), hash=False)  # sequences need not be hashable; None: none
    stop_token_ids: Sequence[int] | None = field(default=(), hash=False)  # None: none
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    suppress_tokens: Sequence[int] | None = field(default=(), hash=False)  # never sampled; None: none

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _finite("temperature", self.temperature, 0.0, 100.0)
        _finite("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, _U32 - 1)
        _finite("min_p", self.min_p, 0.0, 1.0)
        _finite("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _finite("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _finite("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        biases: object = self.logit_bias or {}
        if not isinstance(biases, Mapping):
            raise invalid(f"logit_bias must map token ids to numbers, got {biases!r:.80}", "logit_bias")
        if len(biases) > MAX_LOGIT_BIAS:
            raise invalid(f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, got {len(biases)}", "logit_bias")
        for token_id, bias in biases.items():
            _integer("logit_bias", token_id, 0, _U32 - 1)
            _finite("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -_I64, _I64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _U32 - 1)
        _integer("min_tokens", self.min_tokens, 0, _U32 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _flag(name, getattr(self, name))
        self._check_stops()

    def _check_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _list("stop", () if self.stop is None else self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise invalid(f"at most {MAX_STOP_STRINGS} stop strings, got {len(stop)}", "stop")
        for text in stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
                raise invalid(
                    f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {text!r:.80}", "stop"
                )
        stop_token_ids = _list("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids)
        if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(f"at most {MAX_STOP_TOKEN_IDS} stop token ids, got {len(stop_token_ids)}", "stop_token_ids")
        for token_id in stop_token_ids:
            _integer("stop_token_ids", token_id, 0, _U32 - 1)
        suppressed = _list("suppress_tokens", () if self.suppress_tokens is None else self.suppress_tokens)
        if len(suppressed) > MAX_SUPPRESS_TOKENS:
            raise invalid(
                f"suppress_tokens may name at most {MAX_SUPPRESS_TOKENS} tokens, got {len(suppressed)}",
                "suppress_tokens",
            )
        for token_id in suppressed:
            _integer("suppress_tokens", token_id, 0, _U32 - 1)

    @property
    def sampling(self) -> Sampling:
        """The worker's part."""
        return Sampling(
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            num_logprobs=self.logprobs,
            suppress_tokens=tuple(sorted(set(self.suppress_tokens or ()))),
        )

    @property
    def stopping(self) -> Stopping:
        """The scheduler's part."""
        return Stopping(self.max_tokens, self.min_tokens, tuple(self.stop_token_ids or ()), self.ignore_eos)

    @property
    def text(self) -> TextOptions:
        """The detokenizer's part."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return TextOptions(stop, self.include_stop_str_in_output, self.skip_special_tokens)
