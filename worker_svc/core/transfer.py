"""Between host and device without waiting: small columns go up together, results come down behind an event."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(device: torch.device, *columns: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
    """Columns (i64, one-dimensional) on the device, in one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: kernels are compiled again for pointers that do not.
    """
    starts = np.cumsum([0, *(len(column) + len(column) % 2 for column in columns)])
    packed = torch.empty(int(starts[-1]), dtype=torch.int64, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for start, column in zip(starts, columns, strict=False):
        host[start : start + len(column)] = column
    on_device = packed.to(device, non_blocking=True)
    return tuple(
        on_device[start : start + len(column)] for start, column in zip(starts.tolist(), columns, strict=False)
    )


def upload_floats(device: torch.device, column: npt.NDArray[np.float32]) -> Tensor:
    """A column (f32) on the device, in a copy that the host does not wait for."""
    tensor = torch.from_numpy(column)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Downloads:
    """Brings tensors to the host beside the device's work, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: Download | None = None

    def start(self, tensors: list[Tensor]) -> "Download":
        """Begin to copy `tensors` once the work launched so far is done."""
        download = Download(tensors, self._stream)
        self._last = download
        return download

    def protect(self) -> None:
        """What is launched from here on may overwrite what was to be copied: it waits for the copies."""
        if self._last is not None:
            self._last.hold()


class Download:
    """Tensors on their way to the host; without a stream they are there already."""

    def __init__(self, tensors: list[Tensor], stream: torch.cuda.Stream | None) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors and stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                self._tensors = [
                    torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                    for tensor in tensors
                ]
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record(stream)

    def hold(self) -> None:
        """The current stream goes on once the copies are done."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> list[npt.NDArray[np.generic]]:
        """The values, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
