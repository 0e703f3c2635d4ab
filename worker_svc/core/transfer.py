"""Between host and device without waiting: small columns go up together, results come down after the step."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(device: torch.device, *columns: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
    """Columns (i64, one-dimensional) on the device, in one copy that the host does not wait for.

    Each begins at a multiple of 16 bytes: kernels are compiled again for pointers that do not.
    """
    places, end = [], 0
    for column in columns:
        places.append(slice(end, end + len(column)))
        end += len(column) + len(column) % 2
    packed = torch.empty(end, dtype=torch.int64, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for place, column in zip(places, columns, strict=True):
        host[place] = column
    on_device = packed.to(device, non_blocking=True)
    return tuple(on_device[place] for place in places)


def upload_floats(device: torch.device, column: npt.NDArray[np.float32]) -> Tensor:
    """A column (f32) on the device, in a copy that the host does not wait for."""
    tensor = torch.from_numpy(np.ascontiguousarray(column))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Downloads:
    """Brings what a step samples to the host, after the step's own work: a few bytes take less time on their way than
    another stream takes to wait for the step and the next step for that stream.

    Used by two threads: one launches steps, one takes what they brought.
    """

    def __init__(
        self, device: torch.device, num_rows: int, store: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        """`num_rows`: tokens of a step at most; `store`: see `DeviceDecoder.store`, None: torch copies."""
        self._is_behind = device.type == "cuda"  # the host, so that it must not wait
        self._num_rows = num_rows
        self._device = device
        self._store = store
        self._landings: list[_Landing] = []  # all of them: a kernel may still write into one that nobody else holds
        self._free: list[_Landing] = []

    def start(self, tensors: list[Tensor]) -> "Download":
        """Begin to copy `tensors`, the first of which are the tokens i64[rows]: they are here when the step is done."""
        if not tensors or not self._is_behind:
            return Download(tensors)
        landing = self._free.pop() if self._free else self._make_landing()
        landing.receive(tensors[0], self._store)
        others = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors[1:]
        ]
        return Download(others, landing, self._free)

    def close(self) -> None:
        """Wait for what is on its way, so that the memory that it comes to can be somebody else's."""
        if self._is_behind:
            with suppress(RuntimeError):  # a device that has failed writes nothing any more
                torch.cuda.synchronize(self._device)
        self._landings.clear()
        self._free.clear()

    def _make_landing(self) -> "_Landing":
        self._landings.append(landing := _Landing(self._num_rows))
        return landing


class _Landing:
    """Pinned memory for the tokens of one step after the other."""

    def __init__(self, num_rows: int) -> None:
        self._tensor = torch.empty(num_rows, dtype=torch.int64, pin_memory=True)
        self._views: dict[int, Tensor] = {}
        self._num_rows = 0

    def receive(self, tokens: Tensor, store: Callable[[Tensor, Tensor], None] | None) -> None:
        num_rows = self._num_rows = len(tokens)
        view = self._views.get(num_rows)
        if view is None:
            view = self._views[num_rows] = self._tensor[:num_rows]
        if store is None or not num_rows:
            view.copy_(tokens, non_blocking=True)
        else:
            store(tokens, view)

    def copy(self) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = self._views[self._num_rows].numpy().copy()
        return tokens


class Download:
    """Tensors on their way to the host."""

    def __init__(
        self, tensors: list[Tensor], landing: _Landing | None = None, free: list[_Landing] | None = None
    ) -> None:
        self._tensors = tensors
        self._landing = landing
        self._free = free

    def take(self) -> list[npt.NDArray[np.generic]]:
        """The values; the step is done. To be called once."""
        others: list[npt.NDArray[np.generic]] = [tensor.numpy() for tensor in self._tensors]
        if self._landing is None or self._free is None:
            return others
        tokens = self._landing.copy()
        self._free.append(self._landing)
        return [tokens, *others]
