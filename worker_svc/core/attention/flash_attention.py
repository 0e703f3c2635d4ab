"""The FlashAttention packages behind one call: whichever of them the machine has, for chunks of prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

_V2_BLOCK_TOKENS = 256  # FlashAttention-2 reads blocks of multiples of this only


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences whose last tokens attend, one sequence after the other; all i32 on the device."""

    starts: Tensor  # [seqs + 1]: where each one's queries begin, and the end
    contexts: Tensor  # [seqs]: tokens with keys, the queries' own included
    tables: Tensor  # [seqs, blocks]: blocks of each one
    longest_query: int
    longest_context: int


class PagedAttention(Protocol):
    """Causal attention over keys and values in blocks."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks) -> Tensor:
        """query [tokens, num_heads, head_dim] with any strides but the last, keys and values [num_blocks, block_size,
        num_kv_heads, head_dim] -> [tokens, num_heads, head_dim].
        """


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """A package that was found."""

    name: str
    attend: PagedAttention
    is_recordable: bool  # in a CUDA graph: it launches by the shapes of what it gets, whatever the lengths in them


def find_flash_attention(block_size: int) -> FlashAttention | None:
    """The first of FlashAttention-4, -3 and -2 that is installed and reads blocks of `block_size` tokens."""
    for name, module, function, arguments, is_recordable in _PACKAGES:
        if name == "flash-attn" and block_size % _V2_BLOCK_TOKENS:
            continue
        try:
            found = getattr(import_module(module), function)
        # A package that is there but was built for another machine raises whatever it likes.
        except Exception:  # noqa: BLE001
            continue
        return FlashAttention(name, _attention(found, arguments), is_recordable)
    return None


def _attention(function: Callable[..., Any], arguments: Callable[[Chunks], dict[str, Any]]) -> PagedAttention:
    def attend(query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks) -> Tensor:
        scale = query.shape[-1] ** -0.5
        return _first(function(query, keys, values, **arguments(chunks), softmax_scale=scale, causal=True))

    return attend


def _fourth(chunks: Chunks) -> dict[str, Any]:
    return {
        "cu_seqlens_q": chunks.starts,
        "seqused_k": chunks.contexts,
        "max_seqlen_q": chunks.longest_query,
        "max_seqlen_k": chunks.longest_context,
        "page_table": chunks.tables,
    }


def _third(chunks: Chunks) -> dict[str, Any]:
    return {
        "cu_seqlens_q": chunks.starts,
        "cache_seqlens": chunks.contexts,
        "max_seqlen_q": chunks.longest_query,
        "page_table": chunks.tables,
    }


def _second(chunks: Chunks) -> dict[str, Any]:
    return {
        "cu_seqlens_q": chunks.starts,
        "cu_seqlens_k": torch.nn.functional.pad(chunks.contexts.cumsum(0, dtype=torch.int32), (1, 0)),
        "max_seqlen_q": chunks.longest_query,
        "max_seqlen_k": chunks.longest_context,
        "block_table": chunks.tables,
    }


def _first(out: Any) -> Tensor:
    """Some versions give the sums of exponentials along."""
    attended = out[0] if isinstance(out, tuple) else out
    assert isinstance(attended, Tensor)
    return attended


# Name, module, function, what it calls the arguments, and whether its launches can be recorded.
_PACKAGES: tuple[tuple[str, str, str, Callable[[Chunks], dict[str, Any]], bool], ...] = (
    ("flash-attn-4", "flash_attn.cute", "flash_attn_varlen_func", _fourth, True),
    ("flash-attn-3", "flash_attn_interface", "flash_attn_with_kvcache", _third, False),
    ("flash-attn", "flash_attn", "flash_attn_varlen_func", _second, False),
)
