"""A checkpoint's scales of keys and values that are kept as 8-bit floats, under any of the names that are in use."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from contract.domain.errors import broken, unimplemented
from worker_svc.core.kv_scales import KVScales
from worker_svc.core.models.spec import AttentionSpec
from worker_svc.stored import DTYPES, StoredTensor
from worker_svc.weights import read_headers

_Found = Mapping[str, tuple[Path, StoredTensor]]
_BASE = "model."  # some checkpoints leave it out
# Of keys and of values, after the name of a layer's attention: of llm-compressor, of vLLM and Quark, of ModelOpt, of
# older llm-compressors, and one for both.
_NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
    ("attn.kv_scale", "attn.kv_scale"),
)


def read_kv_scales(directory: Path, attentions: Sequence[AttentionSpec], *, is_text_alone: bool = False) -> KVScales:
    """Those of all layers, in order; 1 of a layer for which none are stored.

    is_text_alone: see `read_headers`.

    Raises:
        PenstockError: INTERNAL (the operator's fault), naming the file and the tensor: it is no positive number, or the
            other of the two is missing; UNIMPLEMENTED: there are several, as for each head.
    """
    headers = read_headers(directory, is_text_alone=is_text_alone)
    found = {name: (path, each) for path, header in headers.items() for name, each in header.items()}
    pairs = [_pair(found, attention.key.name.rpartition(".")[0]) for attention in attentions]
    return KVScales(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))


def _pair(found: _Found, attention: str) -> tuple[float, float]:
    """Of the attention called so."""
    for base in (attention, attention.removeprefix(_BASE)):
        for names in _NAMES:
            keys, values = (f"{base}.{name}" for name in names)
            if keys in found or values in found:
                return _read(found, keys, values), _read(found, values, keys)
    return 1.0, 1.0


def _read(found: _Found, name: str, other: str) -> float:
    if name not in found:
        raise broken(f"{found[other][0]} holds {other}, but no file of the checkpoint {name}: fetch it again")
    path, stored = found[name]
    dtype = DTYPES[stored.dtype]
    if stored.num_bytes != dtype.itemsize:
        shape = list(stored.shape)
        raise unimplemented("kv_cache_dtype", f"kv_cache_dtype 'fp8' with scales of the shape {shape} ({name})")
    with path.open("rb") as file:
        file.seek(stored.begin)
        scale = float(torch.frombuffer(bytearray(file.read(stored.num_bytes)), dtype=dtype).float())
    if not 0 < scale < float("inf"):
        raise broken(f"{path} holds {name} {scale:g}, which is no scale: it must be a positive number")
    return scale
