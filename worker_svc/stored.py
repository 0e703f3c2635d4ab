"""The header of a safetensors file: its tensors, and where in the file they are."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from contract.domain.errors import broken

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES = FLOATS | INTEGERS
_LENGTH_BYTES = 8  # of the header, little-endian, at the beginning of a file
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: row-major, little-endian."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]  # a scalar has one place
    begin: int  # bytes from the beginning of the file
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, in the order in which they are stored.

    Raises:
        PenstockError: INTERNAL, naming the file: it cannot be read, or does not hold what its header says.
    """
    try:
        # The library checks that the header is whole and that the tensors fill the file, without gap or overlap.
        with safe_open(path, framework="pt", device="cpu"), path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise broken(f"{path} is corrupt or cannot be read: {error}") from error
    start = _LENGTH_BYTES + length
    found = {}
    for name, described in header.items():
        if name != _METADATA:
            begin, end = described["data_offsets"]
            shape = tuple(described["shape"]) or (1,)
            found[name] = StoredTensor(described["dtype"], shape, start + begin, end - begin)
    return dict(sorted(found.items(), key=lambda item: item[1].begin))
