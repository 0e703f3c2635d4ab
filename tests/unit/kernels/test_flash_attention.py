"""Chunks through a FlashAttention package against the prefill kernel, where one is installed; and when one is asked."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import DEVICE, DTYPE, assert_near, paged, randn, rotary_table
from torch import Tensor

from worker_svc.core.attention import flash_attention, triton_backend
from worker_svc.core.attention.flash_attention import Chunks, PagedAttention, find_flash_attention
from worker_svc.core.attention.interface import AttentionKind
from worker_svc.core.attention.triton_backend import TritonAttention
from worker_svc.core.batch import Batch, BatchTokens, build_batch, tokens_of
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.attention.decode import DecodeAttention
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.slots import HostSlots

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 4, 2, 16
SCALE = 0.3  # of scores, and of no head by default


def reference(query: Tensor, keys: Tensor, values: Tensor, chunks: Chunks, scale: float) -> Tensor:
    """What the packages promise, in plain torch."""
    out = torch.empty_like(query)
    starts, contexts = chunks.starts.tolist(), chunks.contexts.tolist()
    for index, context in enumerate(contexts):
        blocks = chunks.tables[index, : -(-context // BLOCK_SIZE)].long()
        rows = slice(starts[index], starts[index + 1])
        group = query.shape[1] // keys.shape[2]
        k, v = (each[blocks].flatten(0, 1)[:context].repeat_interleave(group, 1).double() for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * scale
        first = context - (starts[index + 1] - starts[index])
        seen = torch.arange(context, device=k.device) <= first + torch.arange(scores.shape[1], device=k.device)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


def attend(
    past: list[int],
    chunks: list[int],
    flash: PagedAttention | None,
    head_dim: int = 64,
    *,
    hidden_size: int = 0,
    scales_before: bool = False,
) -> Tensor:
    """One layer's attention of sequences with `past` tokens that advance by `chunks`; rows are scaled by their hidden
    states, if they have a size, by the kernels or before.
    """
    contexts = [before + chunk for before, chunk in zip(past, chunks, strict=True)]
    given = paged(past, contexts, NUM_KV_HEADS, head_dim, BLOCK_SIZE)
    shape = KVCacheShape(1, NUM_KV_HEADS, head_dim, BLOCK_SIZE, DTYPE)
    cache = KVCache(shape, len(given.keys), DEVICE)
    cache.keys[0], cache.values[0] = given.keys, given.values
    rotary = object.__new__(RotaryEmbedding)
    rotary.table = rotary_table(max(contexts), head_dim)
    backend = TritonAttention(cache, NUM_HEADS, [AttentionKind(rotary, SCALE)], len(past))
    backend.flash = flash
    batch, tokens = make_batch(past, contexts, given.tables.cpu().numpy())
    columns = tokens.positions, tokens.slot_mappings[0]
    positions, slot_mapping = (torch.from_numpy(each).to(DEVICE) for each in columns)
    step = backend.prepare(batch, positions, [slot_mapping], [given.tables])
    qkv = randn(batch.num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, seed=1)
    unscaled = Unscaled(randn(batch.num_tokens, hidden_size, seed=2, scale=3.0), 1e-5) if hidden_size else None
    if unscaled is not None and scales_before:
        return step.attend(0, (qkv * unscaled.scales()).to(DTYPE), None)
    return step.attend(0, qkv, None, unscaled)


def make_batch(past: list[int], contexts: list[int], tables: np.ndarray) -> tuple[Batch, BatchTokens]:
    limits = Limits(
        num_blocks=4096,
        block_size=BLOCK_SIZE,
        max_num_seqs=len(past),
        max_model_len=4000,
        max_num_batched_tokens=9000,
        vocab_size=9,
    )
    state = HostSlots(limits)
    state.active[:] = True
    state.num_tokens[:], state.num_computed[:] = contexts, past
    state.room[:] = [-(-context // BLOCK_SIZE) * BLOCK_SIZE for context in contexts]
    state.block_tables[0, :, : tables.shape[1]] = tables
    batch = build_batch(np.arange(len(past)), np.array(contexts) - past, state, longest_first=True)
    return batch, tokens_of(batch, state)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FLASH_FLOPS", "_FLASH_FLOPS_OF_MANY", "_FLASH_QUERIES"):
        monkeypatch.setattr(triton_backend, name, 0)


@pytest.mark.parametrize(
    ("past", "chunks"), [([0], [70]), ([20, 0, 33], [40, 64, 1]), ([5, 90, 7, 0], [1, 1, 50, 129])]
)
@pytest.mark.usefixtures("always")
def test_chunks_and_decodes_share_a_step(past: list[int], chunks: list[int]) -> None:
    assert_near(attend(past, chunks, reference), attend(past, chunks, None))


@pytest.mark.parametrize("most_few", [1, 64])
def test_rows_of_a_mixed_step_are_scaled_by_their_hidden_states(most_few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "MOST_SCALED_ROWS", most_few)
    work = [5, 90, 7, 0], [1, 1, 50, 129], None
    assert_near(attend(*work, hidden_size=96), attend(*work, hidden_size=96, scales_before=True))


@pytest.mark.parametrize("hidden_size", [0, 96])
def test_heads_of_many_decodes_are_finished_with_those_of_chunks_as_they_are_alone(
    hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = [*range(3, 37), 20, 0], [1] * 34 + [30, 5], None
    together = attend(*work, hidden_size=hidden_size)
    asked = []
    monkeypatch.setattr(DecodeAttention, "takes_finished", lambda _, sequences: asked.append(sequences))
    assert_near(together, attend(*work, hidden_size=hidden_size))
    assert asked == [len(work[0])]  # as many as slots: kernels are those of a graph


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.usefixtures("always")
def test_an_installed_package_does_what_the_prefill_kernel_does(head_dim: int) -> None:
    flash = find_flash_attention(BLOCK_SIZE) if DEVICE.type == "cuda" else None
    if flash is None:
        pytest.skip("no package of FlashAttention")
    for past, chunks in (([0], [700]), ([20, 0, 333], [400, 64, 129]), ([5, 90, 7, 0], [1, 1, 500, 129])):
        assert_near(attend(past, chunks, flash.attend, head_dim), attend(past, chunks, None, head_dim))


def test_only_long_chunks_are_worth_a_call() -> None:
    assert not is_asked([0] * 3, [40, 200, 1])


@pytest.mark.parametrize(("many", "expected"), [(131, True), (132, False)])
def test_less_attention_is_worth_a_call_in_a_step_of_many_tokens(
    monkeypatch: pytest.MonkeyPatch, many: int, *, expected: bool
) -> None:
    monkeypatch.setattr(triton_backend, "_FLASH_FLOPS_OF_MANY", 0)
    monkeypatch.setattr(triton_backend, "_MANY_TOKENS", many)
    assert is_asked([30, 7, 0], [1, 1, 129]) == expected


def is_asked(past: list[int], chunks: list[int]) -> bool:
    asked: list[int] = []

    def flash(query: Tensor, *rest: object) -> Tensor:
        asked.append(len(query))
        return torch.zeros_like(query)

    attend(past, chunks, flash)
    return bool(asked)


STARTS, CONTEXTS = (torch.tensor(each, dtype=torch.int32) for each in ([0, 2, 5], [7, 3]))
CHUNKS = Chunks(STARTS, CONTEXTS, torch.zeros(2, 1, dtype=torch.int32), longest_query=3, longest_context=7)


@pytest.mark.parametrize(
    ("package", "function", "block_size", "names"),
    [
        pytest.param(
            "flash_attn.cute",
            "flash_attn_varlen_func",
            16,
            {"seqused_k": CONTEXTS, "max_seqlen_k": 7, "page_table": CHUNKS.tables},
            id="flash-attn-4",
        ),
        pytest.param(
            "flash_attn_interface",
            "flash_attn_with_kvcache",
            16,
            {"cache_seqlens": CONTEXTS, "page_table": CHUNKS.tables},
            id="flash-attn-3",
        ),
        pytest.param(
            "flash_attn",
            "flash_attn_varlen_func",
            256,
            {"cu_seqlens_k": torch.tensor([0, 7, 10]), "max_seqlen_k": 7, "block_table": CHUNKS.tables},
            id="flash-attn-2",
        ),
    ],
)
def test_packages_are_called_by_the_names_that_they_have(
    package: str, function: str, block_size: int, names: dict[str, Tensor | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []

    def called(*tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append((tensors, options))
        return tensors[0], None

    monkeypatch.setattr(flash_attention, "import_module", importer(package, SimpleNamespace(**{function: called})))
    found = find_flash_attention(block_size)
    assert found is not None
    query, keys, values = (torch.full((5, 4, 64), float(number)) for number in range(3))
    assert found.attend(query, keys, values, CHUNKS, SCALE) is query
    [(tensors, options)] = calls
    assert [int(tensor[0, 0, 0]) for tensor in tensors] == [0, 1, 2]
    expected = {"cu_seqlens_q": STARTS, "max_seqlen_q": 3, "softmax_scale": SCALE, "causal": True, **names}
    assert options.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(options[name]), torch.as_tensor(value)), name


def importer(package: str, module: object) -> Callable[[str], object]:
    def import_module(name: str) -> object:
        if name != package:
            raise ImportError(name)
        return module

    return import_module


@pytest.mark.parametrize(
    ("package", "block_size"),
    [
        pytest.param("flash_attn", 16, id="too small"),
        pytest.param("flash_attn", 128, id="none of its multiples"),
        *(
            pytest.param("flash_attn.cute", tokens, id=f"{tokens} loaded whole, with what is behind a context's end")
            for tokens in (80, 112, 128, 144)
        ),
    ],
)
def test_some_packages_cannot_have_some_blocks(package: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=reference)
    monkeypatch.setattr(flash_attention, "import_module", importer(package, module))
    assert find_flash_attention(block_size) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("not installed", name="flash_attn_interface"), []),
        (ModuleNotFoundError("what it needs is not", name="flash"), [("flash-attn-3", "ModuleNotFoundError: what")]),
        (OSError("built for another machine"), [("flash-attn-3", "OSError: built for")]),
    ],
)
def test_why_a_package_cannot_be_imported_is_told_unless_it_is_not_there(
    error: Exception, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> object:
        # Of flash-attn-4 the package around it is missing.
        raise error if name == "flash_attn_interface" else ModuleNotFoundError("not installed", name="flash_attn")

    monkeypatch.setattr(flash_attention, "import_module", import_module)
    heard: list[tuple[str, str]] = []
    assert find_flash_attention(256, lambda name, reason: heard.append((name, reason))) is None
    assert [name for name, _ in heard] == [name for name, _ in told]
    assert all(reason.startswith(start) for (_, reason), (_, start) in zip(heard, told, strict=True))
