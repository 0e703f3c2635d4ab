"""The end of a tile of a product of many rows where quack-kernels multiplies: as it is, added to the residual, or with
rows scaled and gates and ups made one. Only to be imported where that package is; what it compiles is kept on disk
under the names here.
"""

from typing import Any

from quack.activation import swiglu
from quack.epilogue.math import unpack
from quack.epilogue.ops import ColVecLoad

from worker_svc.core.kernels.linear.many_ahead import End


class _ScaledGate:
    """silu(scale * gate) * (scale * up) of accumulators that stand side by side."""

    def __quack_semantic_key__(self) -> str:
        # Kernels on disk are named after all that their function refers to; where the package is in no folder named
        # site-packages, it refuses to name its own. So this stands for it: another computation, another name.
        return "silu(scale * gate) * (scale * up), 1"

    def __call__(self, pair: Any, scale: Any) -> Any:
        gate, up = unpack(pair * scale)
        return swiglu(gate, up)


_gate = _ScaledGate()


def _end(acc: Any) -> dict[str, Any]:
    return {"D": acc}


def _end_added(acc: Any, c: Any) -> dict[str, Any]:
    return {"D": acc + c}


def _end_gated(acc: Any, scale: Any) -> dict[str, Any]:
    return {"out": _gate(acc, scale)}


PLAIN = End(_end)
ADDED = End(_end_added)
GATED = End(_end_gated, outputs=("out",), ops={"scale": ColVecLoad("scale")}, mode="acc_pair")
