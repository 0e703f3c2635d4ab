"""Products with a weight, which ways compute: of which kind, how large, and what the weight is stored as."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

# normed: of one row, with the norm before it; biased: with a bias; added: to a residual; gated: of normed rows, with
# the gate after it; plain: alone.
Kind: TypeAlias = Literal["normed", "plain", "biased", "added", "gated"]

BFLOAT16 = "bfloat16"
FP8_W8A8, FP8_W8A16 = "fp8_w8a8", "fp8_w8a16"  # weights of 8-bit floats; rows are rounded to these, or are not
FP8_GROUPS = "fp8_groups"  # weights of 8-bit floats with a scale for each group of inputs; rows are not rounded
INT4 = "int4"  # weights of integers of 4 bits
FP8_FORMS = (FP8_W8A8, FP8_W8A16, FP8_GROUPS)
NARROW = (*FP8_FORMS, INT4)


@dataclass(frozen=True, slots=True)
class Product:
    """A product with a weight [outputs, inputs]; a gated one's outputs are gates, then ups."""

    kind: Kind
    outputs: int
    inputs: int
    dtype: str = BFLOAT16  # torch's name of the weights', or one of `NARROW`
    group: int | None = None  # inputs that share a scale, in `FP8_GROUPS` and `INT4`; None: all

    @property
    def made(self) -> int:
        """The outputs that come out: a gated product's ups are its gates' other factors."""
        return self.outputs // 2 if self.kind == "gated" else self.outputs
