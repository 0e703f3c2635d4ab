"""On a GPU: steps with chunks of prompts as graphs, among steps of all other kinds, against transformers."""

from pathlib import Path

import pytest
import torch
from checkpoints import Variant, save_rounded_checkpoint
from near_the_likeliest import NUM_PROMPTS, assert_near_the_likeliest, load, sequences
from plans import drive
from test_gpu_parity import VARIANTS

from contract.domain.params import Sampling
from worker_svc.core import chunk_graphs
from worker_svc.core.attention import triton_backend
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import ChunkGraphs, Shape
from worker_svc.core.graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Windows, chunks or sinks: their decodes' kernel leaves no row out.
ONE_BY_ONE = ("gemma2", "gemma3", "cohere2", "gpt_oss", "llama4")


def replayed_shapes(variant: Variant, directory: Path, monkeypatch: pytest.MonkeyPatch) -> set[Shape]:
    """Those of a run in which one sequence enters with each step, the first of one token, and many come to an end while
    others are at their prompts; its tokens are checked.
    """
    found: list[Shape | None] = []
    shape_of = ChunkGraphs.shape_of

    def remembered(self: ChunkGraphs, batch: Batch, num_rows: int = 0) -> Shape | None:
        found.append(shape_of(self, batch, num_rows))
        return found[-1]

    monkeypatch.setattr(ChunkGraphs, "shape_of", remembered)
    model = save_rounded_checkpoint(directory, variant)
    loaded = load(directory, dtype="bfloat16", attention="triton", chunk_graphs=True)
    assert isinstance(loaded.runner._decoder, DecodeGraphs)
    loaded.runner._cache.keys.fill_(torch.nan)
    loaded.runner._cache.values.fill_(torch.nan)
    drives = sequences(Sampling(temperature=0.0))
    drive(loaded.runner, drives, chunk=100, window=3, stagger=1)
    assert_near_the_likeliest(model, drives)
    return {shape for shape in found if shape is not None}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tokens_in_bf16_are_near_the_likeliest(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = replayed_shapes(variant, tmp_path, monkeypatch)
    assert len(replayed) > 5
    assert {shape.decodes for shape in replayed} == {16, NUM_PROMPTS}


@pytest.mark.parametrize(
    "variant", [each for each in VARIANTS if each.name not in ONE_BY_ONE], ids=lambda variant: variant.name
)
def test_so_they_are_where_tokens_have_the_rows_of_decodes_that_are_not_there(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_graphs, "_MOST_APART", 64)
    monkeypatch.setattr(chunk_graphs, "_FLEXIBLE_ROWS", range(128, 577, 64))
    replayed = {shape for shape in replayed_shapes(variant, tmp_path, monkeypatch) if shape.is_flexible}
    assert len(replayed) > 2
    assert {shape.decodes for shape in replayed} == {NUM_PROMPTS}


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda variant: variant.name)
def test_so_they_are_where_flash_attention_attends(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flash_attn.cute")
    # However little there is to attend to; steps are padded by less than the sizes in use would make it, and by more.
    monkeypatch.setattr(triton_backend, "_FLASH_FLOPS", 0)
    monkeypatch.setattr(chunk_graphs, "_FEWEST_BY_FLASH", 256)
    monkeypatch.setattr(chunk_graphs, "_LONGEST_PAD", 100)
    replayed = {shape for shape in replayed_shapes(variant, tmp_path, monkeypatch) if shape.by_flash}
    assert len(replayed) > 2
    assert {shape.decodes for shape in replayed} == {16, NUM_PROMPTS}
