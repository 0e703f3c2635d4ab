"""On a GPU: small steps with chunks of prompts as graphs, among steps of all other kinds, against transformers."""

from pathlib import Path

import pytest
import torch
from checkpoints import Variant, save_checkpoint
from plans import drive
from test_gpu_parity import MAX_GAP, VARIANTS, gaps, load, sequences

from penstock.domain.params import Sampling
from worker_svc.core.batch import Batch
from worker_svc.core.chunk_graphs import ChunkGraphs
from worker_svc.core.decoder import DecodeOutput
from worker_svc.core.graphs import DecodeGraphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tokens_in_bf16_are_near_the_likeliest(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []
    compute = ChunkGraphs.compute

    def counted(self: ChunkGraphs, batch: Batch) -> DecodeOutput:
        replayed.append(batch.num_tokens)
        return compute(self, batch)

    monkeypatch.setattr(ChunkGraphs, "compute", counted)
    model = save_checkpoint(tmp_path, variant).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype="bfloat16", attention="triton", chunk_graphs=True)
    assert isinstance(loaded.runner._decoder, DecodeGraphs)
    loaded.runner._cache.keys.fill_(torch.nan)
    loaded.runner._cache.values.fill_(torch.nan)
    drives = sequences(Sampling(temperature=0.0))
    # One enters with each step: the first dozen steps are small.
    drive(loaded.runner, drives, chunk=100, window=3, stagger=1)
    assert len(replayed) > 5
    assert float(gaps(model.to("cuda", torch.float32), drives).max()) < MAX_GAP
