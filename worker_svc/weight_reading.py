"""Carries tensors from files to a device: threads with two buffers each, one being read while the other is copied.

From page cache to a GPU this is bound by the bus, not by one thread's page faults: files are read into pinned memory
with plain reads, which let go of the interpreter's lock.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from contract.domain.errors import broken
from worker_svc.core.layers.placement import WantedTensor
from worker_svc.stored import DTYPES, StoredTensor

NUM_LANES = 8
BUFFER_BYTES = 16 << 20
_TURN_S = 0.0005


@dataclass(frozen=True, slots=True)
class TensorLoad:
    """A stored tensor, and what is wanted of it; the shapes agree."""

    path: Path
    stored: StoredTensor
    wanted: WantedTensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole rows of a stored tensor."""

    path: Path
    begin: int  # bytes from the beginning of the file
    dtype: torch.dtype
    shape: tuple[int, ...]
    within: tuple[slice, ...]  # of each row
    destination: Tensor

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@contextmanager
def progress(loads: Iterable[TensorLoad]) -> "Iterator[tqdm[Any]]":
    """A bar of the bytes that they read, on a terminal only."""
    total_bytes = sum(piece.num_bytes for load in loads for piece in _pieces(load))
    bar: tqdm[Any] = tqdm(total=total_bytes, desc="Weights", unit="B", unit_scale=True, unit_divisor=1024, disable=None)
    with bar:
        yield bar


def carry(loads: Sequence[TensorLoad], bar: "tqdm[Any]") -> int:
    """Fill all that is wanted, which is on one device; waits for it. The bytes that were read, which `bar` shows.

    Raises:
        PenstockError: INTERNAL, naming the file: it cannot be read, or is shorter than its header says.
    """
    if not loads:
        return 0
    pieces = [piece for load in loads for piece in _pieces(load)]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    device = loads[0].wanted.destination.device
    buffer_bytes = max(piece.num_bytes for piece in pieces)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in {load.path for load in loads}}
        stack.enter_context(_short_turns())
        waiting = _Waiting(pieces, bar)
        threads = stack.enter_context(ThreadPoolExecutor(min(NUM_LANES, len(pieces)), "weights"))
        lanes = [threads.submit(_run, waiting, files, device, buffer_bytes) for _ in range(min(NUM_LANES, len(pieces)))]
        for lane in lanes:
            lane.result()
    return total_bytes


@contextmanager
def _short_turns() -> Iterator[None]:
    """A lane needs the interpreter's lock a few times a piece, for microseconds; a thread that imports packages keeps
    it for 5 ms each time.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class _Waiting:
    """The pieces that nobody has taken yet; empty as soon as a lane has failed."""

    def __init__(self, pieces: list[_Piece], bar: "tqdm[Any]") -> None:
        self._lock = threading.Lock()
        self._pieces = iter(pieces)
        self._bar = bar

    def __iter__(self) -> Iterator[_Piece]:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            yield piece
            with self._lock:
                self._bar.update(piece.num_bytes)

    def clear(self) -> None:
        with self._lock:
            self._pieces = iter(())


def _run(waiting: _Waiting, files: dict[Path, int], device: torch.device, buffer_bytes: int) -> None:
    """One lane."""
    try:
        with torch.inference_mode():
            if device.type == "cuda":
                _carry_to_gpu(waiting, files, device, buffer_bytes)
            else:
                buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
                for piece in waiting:
                    piece.destination.copy_(_read(files[piece.path], piece, buffer)[:, *piece.within])
    except BaseException:
        waiting.clear()
        raise


def _carry_to_gpu(waiting: _Waiting, files: dict[Path, int], device: torch.device, buffer_bytes: int) -> None:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Behind what made the destinations.
    stream.wait_stream(torch.cuda.default_stream(device))
    buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in buffers]  # type: ignore[no-untyped-call]
    for number, piece in enumerate(waiting):
        turn = number % len(buffers)
        copied[turn].synchronize()
        rows = _read(files[piece.path], piece, buffers[turn])
        with torch.cuda.stream(stream):
            if rows.dtype == piece.destination.dtype and rows.shape == piece.destination.shape:
                piece.destination.copy_(rows, non_blocking=True)
            else:
                # What is only a part of a row, or of another dtype, is cut and converted there.
                piece.destination.copy_(rows.to(device, non_blocking=True)[:, *piece.within])
            copied[turn].record(stream)
    stream.synchronize()


def _read(file: int, piece: _Piece, buffer: Tensor) -> Tensor:
    """The piece's rows, in `buffer`."""
    wanted = buffer[: piece.num_bytes]
    left, begin = wanted.numpy().data, piece.begin
    while left:
        try:
            num_read = os.preadv(file, [left], begin)
        except OSError as error:
            raise broken(f"{piece.path} is corrupt or cannot be read: {error}") from error
        if num_read == 0:
            raise broken(f"{piece.path} is corrupt or cannot be read: it has become shorter")
        left, begin = left[num_read:], begin + num_read
    return wanted.view(piece.dtype).view(piece.shape)


def _pieces(load: TensorLoad) -> Iterator[_Piece]:
    """The rows that are wanted, in pieces that fit into a buffer; a row longer than that is one."""
    stored, wanted = load.stored, load.wanted
    first, last, _ = wanted.index[0].indices(stored.shape[0])
    row_bytes = stored.num_bytes // max(1, stored.shape[0])
    at_once = max(1, BUFFER_BYTES // max(1, row_bytes))
    for row in range(first, last, at_once):
        end = min(row + at_once, last)
        yield _Piece(
            path=load.path,
            begin=stored.begin + row * row_bytes,
            dtype=DTYPES[stored.dtype],
            shape=(end - row, *stored.shape[1:]),
            within=wanted.index[1:],
            destination=wanted.destination[row - first : end - first],
        )


def _open(path: Path, stack: ExitStack) -> int:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise broken(f"{path} is corrupt or cannot be read: {error}") from error
    stack.callback(os.close, file)
    return file
