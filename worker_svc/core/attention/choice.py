"""The choice of kernels: decided once, from what there is."""

from dataclasses import dataclass

import torch

from contract.domain.errors import invalid
from worker_svc.core.kv_cache import KVCacheShape

_HALF = (torch.bfloat16, torch.float16)
_HEAD_DIMS = range(64, 257, 8)  # kernels read eight of a head's dimensions at a time, and have tiles of up to 256
_MAX_QUERIES_PER_KV_HEAD = 64
_MAX_LATENT_DIMS = 576  # with rotated keys; more would not fit into a program's registers


@dataclass(frozen=True, slots=True)
class Choice:
    """`name` is torch or triton; `reason` says why, for the log."""

    name: str
    reason: str


def choose(
    requested: str,
    device: torch.device,
    shape: KVCacheShape,
    num_heads: int,
    *,
    has_triton: bool,
    has_eight_bits: bool,
    is_interpreted: bool,
) -> Choice:
    """Triton's kernels for half precision on CUDA, where they fit the model's heads; torch for everything else.

    Args:
        requested: auto, torch or triton.
        device: what computes.
        shape: of this rank's KV cache.
        num_heads: query heads of this rank.
        has_triton: whether it can be imported.
        has_eight_bits: whether the device converts 8-bit floats by itself.
        is_interpreted: Triton's kernels run in its interpreter, on any device and in fp32 too.

    Raises:
        PenstockError: INVALID_ARGUMENT, what was asked for by name cannot be had.
    """
    if requested not in ("auto", "torch", "triton"):
        raise invalid(f"attention must be auto, torch or triton, got {requested!r}", "attention")
    if requested == "torch":
        return Choice("torch", "asked for")
    missing = "triton is not installed" if not has_triton else None
    if missing is None and not is_interpreted:
        missing = _missing(device, shape, has_eight_bits=has_eight_bits)
    missing = missing or _unfit(shape, num_heads)
    if requested == "triton":
        if missing is not None:
            raise invalid(f"attention is triton, but {missing}: use torch or auto", "attention")
        return Choice("triton", "asked for")
    return Choice("triton", "half precision on CUDA") if missing is None else Choice("torch", missing)


def _missing(device: torch.device, shape: KVCacheShape, *, has_eight_bits: bool) -> str | None:
    """The reason why the device or the dtypes do not fit; None: they do."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if shape.dtype not in _HALF:
        return f"the dtype is {str(shape.dtype).removeprefix('torch.')}"
    if shape.scales is not None and not has_eight_bits:
        return "the card does not convert the 8-bit floats of the KV cache by itself, as Ada and Hopper do"
    return None


def _unfit(shape: KVCacheShape, num_heads: int) -> str | None:
    """The reason why the kernels cannot attend over such a cache; None: they can."""
    if shape.shares_values:
        if shape.head_dim > _MAX_LATENT_DIMS:
            most = _MAX_LATENT_DIMS
            return f"its kernels have latents and rotated keys of up to {most} dimensions, not {shape.head_dim}"
        return None
    if shape.head_dim not in _HEAD_DIMS:
        return f"its kernels have heads of 64 to 256 dimensions, in steps of 8, not of {shape.head_dim}"
    if num_heads > _MAX_QUERIES_PER_KV_HEAD * shape.num_kv_heads:
        return f"its kernels have no more than {_MAX_QUERIES_PER_KV_HEAD} queries for a key"
    return None
