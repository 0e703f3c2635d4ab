"""Configurations made small: fewer layers, narrower, with the ratios of their heads, and with bounds of positions that
short sequences pass where the model's own contexts pass theirs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

VOCAB_SIZE = 128
LONGEST = 64  # tokens of a sequence that stay within all bounds
PASSED_BOUND, _PASSED_POSITIONS = 8, 24
_LEAST_DIM, _LEAST_HEADS, _LEAST_SIZE = 16, 2, 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_WINDOWS = ("window", "chunk_size")
_POSITIONS = ("max_position", "n_positions", "n_ctx", "max_seq", "seq_length", "target_positions", "floor_scale")
_SIZES = ("_size", "_dim", "_dims", "_rank", "n_embd", "d_model", "n_inner", "d_ff", "d_kv", "kv_channels", "dim")
_OF_HEADS = ("head_dim", "_rank", "rotary_dim", "kv_channels", "d_kv", "rope_dim")
_NO_SIZES = ("kernel", "patch", "image", "batch", "group", "conv", "block")
_COUNTS = ("layer", "expert")
_TABLES = ("num_buckets",)  # of distances: code has their number, too
_ROTARY_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_FACTORS = ("short_factor", "long_factor")  # one for each pair of dimensions
_SECTIONS = ("mrope_section",)  # pairs of dimensions


class _Role(Enum):
    """The meaning of a number, as its name tells it."""

    VOCABULARY = auto()
    TOKEN = auto()
    POSITIONS = auto()  # of a context
    BOUND = auto()  # a window, or whatever else tokens may be compared with
    HEADS = auto()
    PAIRS = auto()  # of a head's dimensions
    DIM = auto()  # of a head
    SIZE = auto()
    COUNT = auto()


def _role(name: str, value: int) -> _Role:
    roles = {
        _Role.VOCABULARY: "vocab" in name,
        _Role.TOKEN: name.endswith(("token_id", "token_ids", "token_index")),
        _Role.POSITIONS: _has(name, _POSITIONS),
        _Role.BOUND: _has(name, _WINDOWS) and not name.endswith(("layers", "pattern")),
        _Role.HEADS: name.endswith(("heads", "n_head")),
        _Role.PAIRS: name in _SECTIONS,
        _Role.DIM: name.endswith(_OF_HEADS) and value > _LEAST_SIZE,
        _Role.SIZE: name.endswith(_SIZES) and not _has(name, _NO_SIZES) and value > _LEAST_SIZE,
        _Role.COUNT: value <= _LEAST_SIZE or _has(name, _COUNTS) or name.endswith(_TABLES),
    }
    return next((role for role, is_it in roles.items() if is_it), _Role.BOUND)


@dataclass(frozen=True, slots=True)
class Shrinking:
    """The divisors of a configuration's sizes."""

    dims: int  # of a head's dimensions
    heads: int
    max_model_len: int  # of the contexts of the whole model
    passed_bound: int = PASSED_BOUND  # that windows and the like become, where contexts pass them

    def shrink(self, fields: Mapping[str, Any], num_layers: int | None = None) -> dict[str, Any]:
        """The fields of `config.json`, and of what stands in it, made small. num_layers: of the first ones that stay;
        None: all.
        """
        whole = _first(fields, _LAYERS)
        return {name: self._shrunk(str(name), value, whole, num_layers) for name, value in fields.items()}

    def _shrunk(self, name: str, value: Any, whole: int | None, num_layers: int | None) -> Any:
        if isinstance(value, Mapping):
            return self.shrink(_first_layers(value, num_layers), num_layers)
        if isinstance(value, list):
            if num_layers is not None and len(value) == whole:
                value = value[:num_layers]
            if name in _FACTORS:
                return value[:: self.dims][: len(value) // self.dims]
            return [self._shrunk(name, each, whole, num_layers) for each in value]
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if name in _LAYERS:
            return value if num_layers is None else min(value, num_layers)
        return self._number(name, value)

    def _number(self, name: str, value: int) -> int:
        of_dims, of_sizes = value // self.dims, value // (self.dims * self.heads)
        by_role = {
            _Role.VOCABULARY: min(value, VOCAB_SIZE),
            _Role.TOKEN: min(value, VOCAB_SIZE - 1),
            _Role.POSITIONS: self._bound(value, _PASSED_POSITIONS),
            _Role.BOUND: self._bound(value, self.passed_bound),
            _Role.HEADS: max(1, value // self.heads),
            _Role.PAIRS: max(1, of_dims),
            _Role.DIM: max(2, of_dims // 2 * 2),
            _Role.SIZE: max(8, of_sizes // 8 * 8),
            _Role.COUNT: value,
        }
        return by_role[_role(name, value)]

    def _bound(self, value: int, passed: int) -> int:
        """Contexts that stay within a bound are to do so when they are short."""
        if value <= 0:
            return value
        return LONGEST if value >= self.max_model_len else min(value, passed)


def shrinkings(fields: Mapping[str, Any], max_model_len: int, passed_bound: int = PASSED_BOUND) -> Iterator[Shrinking]:
    """Ways to shrink the fields of `config.json`, the smallest first."""
    leaves = _leaves(_of_text(fields))
    sizes = {name: value for name, value in leaves.items() if isinstance(value, int) and not isinstance(value, bool)}
    heads = _heads_divisor(sizes)
    for dims in dict.fromkeys((_dims_divisor(leaves, sizes), 1)):
        yield Shrinking(dims, heads, max_model_len, passed_bound)
    if heads > 1:
        yield Shrinking(1, 1, max_model_len, passed_bound)


def num_layers_of(fields: Mapping[str, Any]) -> int | None:
    """The layers of a decoder; None: its configuration does not say it in any way that is known."""
    return _first(_of_text(fields), _LAYERS)


def _dims_divisor(leaves: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """The largest power of two that leaves whole pairs everywhere, and enough of them."""
    of_heads = [value for name, value in sizes.items() if name.endswith(_OF_HEADS) and value > _LEAST_SIZE]
    width, heads = _first(sizes, _WIDTHS), _first(sizes, ("num_attention_heads", "n_head", "n_heads", "num_heads"))
    if width is not None and heads and not of_heads:
        of_heads.append(width // heads)
    shares = [float(value) for name, value in leaves.items() if name in _ROTARY_SHARES and value]

    def suits(divisor: int) -> bool:
        return all(value % (2 * divisor) == 0 and value // divisor >= _LEAST_DIM for value in of_heads) and all(
            int(value / divisor * share) % 2 == 0 and int(value / divisor * share) > 0
            for value in of_heads
            for share in shares
        )

    return max((divisor for divisor in (16, 8, 4, 2) if suits(divisor)), default=1) if of_heads else 1


def _heads_divisor(sizes: Mapping[str, int]) -> int:
    """The largest number that divides all counts of heads and leaves a few."""
    counts = [value for name, value in sizes.items() if name.endswith(("heads", "n_head")) and value > 0]
    if not counts:
        return 1
    common, least = math.gcd(*counts), min(counts)
    kept = min(_LEAST_HEADS, least)
    return max(each for each in range(1, common + 1) if common % each == 0 and least // each >= kept)


def _leaves(fields: Mapping[str, Any]) -> dict[str, Any]:
    """All fields, and those of objects within unless they are said outside, too."""
    within = [_leaves(value) for value in fields.values() if isinstance(value, Mapping)]
    own = {name: value for name, value in fields.items() if not isinstance(value, Mapping)}
    return {name: value for each in (*within, own) for name, value in each.items()}


def _of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a decoder, where those of other media stand beside them."""
    nested = fields.get("text_config")
    return nested if isinstance(nested, Mapping) else fields


def _first_layers(fields: Mapping[Any, Any], num_layers: int | None) -> Mapping[Any, Any]:
    """Without what is said of further layers, where fields are numbers of these."""
    if num_layers is None or not fields or not all(str(name).isdigit() for name in fields):
        return fields
    return {name: value for name, value in fields.items() if int(name) < num_layers}


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((value for name in names if isinstance(value := fields.get(name), int)), None)


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)
