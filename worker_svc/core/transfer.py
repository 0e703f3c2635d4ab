"""Between host and device without waiting: small columns go up together, results come down behind an event."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(device: torch.device, *columns: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
    """Columns (i64, one-dimensional) on the device, in one copy that the host does not wait for."""
    packed = torch.from_numpy(np.concatenate(columns))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return torch.split(packed, [len(column) for column in columns])


def upload_floats(device: torch.device, column: npt.NDArray[np.float32]) -> Tensor:
    """A column (f32) on the device, in a copy that the host does not wait for."""
    tensor = torch.from_numpy(column)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Download:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._tensors = tensors

    def wait(self) -> list[npt.NDArray[np.generic]]:
        """The values, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
