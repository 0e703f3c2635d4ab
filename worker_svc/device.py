"""The device of a worker and the dtype of its model."""

import torch

from contract.domain.errors import invalid
from worker_svc.core.memory import Budget
from worker_svc.runner_options import RunnerOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(options: RunnerOptions) -> torch.device:
    """The device that is asked for, made the current one.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `device`: it is not there.
    """
    name = options.device
    if name not in ("auto", "cpu", "cuda"):
        raise invalid(f"device must be auto, cpu or cuda, got {name!r}", "device")
    if name == "cuda" and not torch.cuda.is_available():
        raise invalid("device is cuda, but torch finds no CUDA device: use cpu or auto", "device")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # fp32 means fp32: TF32 would keep ten bits of a product's mantissa.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    device = torch.device("cuda", options.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype of the model: on a CPU float32 unless another is named. `stored`: as the checkpoint says.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `dtype`: there is no such one.
    """
    if name == "auto":
        name = (stored or "float32") if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise invalid(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}", "dtype")
    return _DTYPES[name]


def measure_budget(device: torch.device, share: float) -> Budget | None:
    """Of a GPU, before anything is loaded."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Budget(total_bytes, share, total_bytes - free_bytes)
