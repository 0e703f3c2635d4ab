"""The formats of linear layers, as values without tensors, and which layers have them."""

import re
from dataclasses import dataclass
from fnmatch import translate
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Fp8ChannelSpec:
    """8-bit floats with a scale for each output."""

    rounds_inputs: bool  # to 8 bits too, with a scale for each token


@dataclass(frozen=True, slots=True)
class Fp8TensorSpec:
    """8-bit floats with one scale."""

    rounds_inputs: bool  # as above
    scale: str = "weight_scale"  # the suffix of the tensor that has it


@dataclass(frozen=True, slots=True)
class Fp8BlockSpec:
    """8-bit floats with a scale for each block of the weight."""

    outputs: int  # of a block
    inputs: int
    scale: str  # the suffix of the tensor of scales, which weights are multiplied with


@dataclass(frozen=True, slots=True)
class Fp8OnlineSpec:
    """Floats that are rounded as in `Fp8ChannelSpec` when they are read."""

    rounds_inputs: bool = True


@dataclass(frozen=True, slots=True)
class AwqSpec:
    """Numbers of 4 bits, eight of different outputs in a word, a scale and a zero for each group of inputs."""

    group: int | None  # inputs that share a scale; None: all, as in the next


@dataclass(frozen=True, slots=True)
class GptqSpec:
    """Numbers of some bits, those of neighbouring inputs in a word, a scale and a zero for each group of inputs."""

    bits: int
    group: int | None
    has_order: bool  # a tensor says which group each input belongs to
    zeros_less_one: bool  # zeros are stored less one


@dataclass(frozen=True, slots=True)
class IntSpec:
    """Numbers of some bits with a scale for each output or for groups of its inputs, as compressed-tensors has them."""

    bits: int
    is_packed: bool  # several in a word; else one of 8 bits in a byte
    group: int | None
    has_zeros: bool
    has_order: bool  # as above
    has_one_scale: bool = False


@dataclass(frozen=True, slots=True)
class Mxfp4Spec:
    """Floats of 4 bits, two in a byte, with a power of two for 32 inputs (OCP Microscaling)."""

    has_blocks: bool = True  # in a tensor of blocks, as experts of gpt-oss


@dataclass(frozen=True, slots=True)
class Nvfp4Spec:
    """Floats of 4 bits, two in a byte, with an 8-bit float for 16 inputs and a scale of all of these."""

    numbers: str  # the suffix of the tensor of the floats
    scale: str  # of the one scale
    divides: bool  # the one scale divides the others; else it multiplies them


FormatSpec: TypeAlias = (
    Fp8ChannelSpec | Fp8TensorSpec | Fp8BlockSpec | Fp8OnlineSpec | AwqSpec | GptqSpec | IntSpec | Mxfp4Spec | Nvfp4Spec
)


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """One format for all linear layers but some."""

    format: FormatSpec
    ignored: tuple[str, ...] = ()  # dense layers: names, or patterns after `re:`
    only: tuple[str, ...] = ()  # quantized layers, as above; empty: all
    method: str = "compressed-tensors"  # as the configuration names it
    unused: tuple[str, ...] = ()  # suffixes of stored tensors that nothing here reads
    has_kv_scales: bool = False  # for keys and values in 8 bits
    other_kv_scheme: str | None = None  # in which these are not 8-bit floats with one scale: by what it differs

    def covers(self, name: str) -> bool:
        """Return whether the layer called `name` is quantized."""
        if self.only and not any(_matches(each, name) for each in self.only):
            return False
        return not any(_matches(each, name) for each in self.ignored)


def parts_of_names(parts: list[str]) -> tuple[str, ...]:
    """Patterns of names that have one of `parts`, whole words between dots, in which `*` stands for anything."""
    return tuple(f"re:(.*\\.)?{_pattern(part)}(\\..*)?$" for part in parts)


def _pattern(part: str) -> str:
    return translate(part).removesuffix(r"\z").removesuffix(r"\Z")


def _matches(pattern: str, name: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else pattern == name
