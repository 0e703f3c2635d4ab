"""The FlashAttention packages behind one call: whichever of them the machine has, for chunks of prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

_V2_BLOCK_TOKENS = 256  # FlashAttention-2 reads blocks of multiples of this only
# FlashAttention-4 loads blocks as long as its tiles whole: NaN that another sequence left behind a context's end would
# come into it. How long they are on a Hopper is up to the size of a head.
_V4_TILE_TOKENS = frozenset({80, 112, 128, 144})


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences whose last tokens attend, one sequence after the other; all i32 on the device."""

    starts: Tensor  # [seqs + 1]: where each one's queries begin, and the end: rows before and after are nobody's
    contexts: Tensor  # [seqs]: tokens with keys, the queries' own included
    tables: Tensor  # [seqs, blocks]: blocks of each one
    longest_query: int
    longest_context: int


class PagedAttention(Protocol):
    """Causal attention over keys and values in blocks."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks, scale: float) -> Tensor:
        """query [tokens, num_heads, head_dim] with any strides but the last, keys and values [num_blocks, block_size,
        num_kv_heads, head_dim] -> [tokens, num_heads, head_dim], where nobody's rows may be anything;
        `scale`: of scores.
        """


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """A package that was found."""

    name: str
    attend: PagedAttention
    is_recordable: bool  # in a CUDA graph: it launches by the shapes of what it gets, whatever the lengths in them


def _nobody(_name: str, _reason: str) -> None:
    """Observes nothing."""


def find_flash_attention(block_size: int, observe: Callable[[str, str], None] = _nobody) -> FlashAttention | None:
    """The first of FlashAttention-4, -3 and -2 that is installed and can have blocks of `block_size` tokens.

    `observe` is told the name of each that is there and cannot be imported, and why.
    """
    for package in _PACKAGES:
        if not package.suits(block_size):
            continue
        try:
            found = getattr(import_module(package.module), package.function)
        # A package that is there but was built for another machine raises whatever it likes.
        except Exception as error:  # noqa: BLE001
            if not _is_missing(package.module, error):
                observe(package.name, f"{type(error).__name__}: {error}")
            continue
        return FlashAttention(package.name, _attention(found, package.arguments), package.is_recordable)
    return None


def _is_missing(module: str, error: Exception) -> bool:
    """Return whether it is the module, or a package around it, that was not found, and not one that it imports."""
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")


def _attention(function: Callable[..., Any], arguments: Callable[[Chunks], dict[str, Any]]) -> PagedAttention:
    def attend(query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks, scale: float) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class _Package:
    """One that may be installed."""

    name: str
    module: str
    function: str
    arguments: Callable[[Chunks], dict[str, Any]]  # what it calls them
    suits: Callable[[int], bool]  # blocks of so many tokens
    is_recordable: bool = False  # see `FlashAttention`


_PACKAGES = (
    _Package(
        name="flash-attn-4",
        module="flash_attn.cute",
        function="flash_attn_varlen_func",
        arguments=_fourth,
        suits=lambda tokens: tokens not in _V4_TILE_TOKENS,
        is_recordable=True,
    ),
    _Package(
        name="flash-attn-3",
        module="flash_attn_interface",
        function="flash_attn_with_kvcache",
        arguments=_third,
        suits=lambda _tokens: True,
    ),
    _Package(
        name="flash-attn",
        module="flash_attn",
        function="flash_attn_varlen_func",
        arguments=_second,
        suits=lambda tokens: tokens % _V2_BLOCK_TOKENS == 0,
    ),
)
