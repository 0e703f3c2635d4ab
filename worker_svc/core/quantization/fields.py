"""Fields of a `quantization_config`, and what is refused of them."""

from collections.abc import Mapping
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError
from worker_svc.core.quantization.spec import parts_of_names

# Of caches in 8 bits.
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}
_KV_NAMES = ("static", "fp8", "FP8")
# Of inputs that are rounded with a scale that was measured before.
INPUT_SCALES = (".input_scale", ".input_zero_point", ".activation_scale")
_HEAD = "lm_head"


def refused(what: str) -> PenstockError:
    """An UNIMPLEMENTED error that names a way to quantize, and what to do."""
    return PenstockError(
        ErrorCode.UNIMPLEMENTED,
        f"quantization {what} is not implemented yet: take the checkpoint without quantization, or one in another "
        "format (`penstock models` lists them)",
        param="quantization",
    )


def require(method: str, name: str, value: Any, *wanted: Any) -> None:
    """Refuse a value that is none of those wanted.

    Raises:
        PenstockError: UNIMPLEMENTED, naming the method, the field and the value.
    """
    if value not in wanted:
        raise refused(f"({method}) whose {name} is {value!r} and not {' or '.join(map(repr, wanted))}")


def other_kv_scheme(told: Any) -> str | None:
    """The first thing in which a scheme for keys and values is not 8-bit floats with one scale; None: it is."""
    if isinstance(told, Mapping):
        others = [f"{name} {told[name]!r}" for name, usual in _KV_SCHEME.items() if told.get(name, usual) != usual]
        return others[0] if others else None
    return None if told is None or told in _KV_NAMES else repr(told)


def group_size(method: str, config: Mapping[str, Any], name: str = "group_size") -> int | None:
    """Inputs that share a scale; None: all do.

    Raises:
        PenstockError: UNIMPLEMENTED: it is no such number.
    """
    size = config.get(name, -1)
    if type(size) is not int or not (size == -1 or size > 0):
        raise refused(f"({method}) whose {name} is {size!r} and not a number of inputs")
    return None if size == -1 else size


def dense_parts(method: str, listed: Any, *, has_dense_head: bool = True) -> tuple[str, ...]:
    """Patterns of the layers that a list of parts of their names keeps dense, and the head's.

    Raises:
        PenstockError: UNIMPLEMENTED: it is no list of names.
    """
    if not isinstance(listed, list | None) or not all(isinstance(each, str) for each in listed or ()):
        raise refused(f"({method}) whose list of layers that are not quantized is {listed!r}")
    return parts_of_names([*(listed or ()), *([_HEAD] if has_dense_head else [])])
