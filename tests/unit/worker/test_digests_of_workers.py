"""Workers that compute other tokens of one checkpoint are of another model."""

from typing import Any

from penstock.launcher.layout import BUNDLED_MODEL
from worker_svc.loading import load_worker
from worker_svc.settings import WorkerSettings


def digest(**changes: Any) -> bytes:
    sizes: dict[str, Any] = {"num_blocks": 64, "max_model_len": 64}
    loaded = load_worker(WorkerSettings(model=str(BUNDLED_MODEL), device="cpu", **(sizes | changes)))
    loaded.close()
    return loaded.model_digest


def test_what_rounds_weights_or_caches_is_another_model_and_what_does_not_is_the_same() -> None:
    digests = [
        digest(),
        digest(dtype="bfloat16"),
        digest(quantization="fp8"),
        digest(kv_cache_dtype="fp8"),
        digest(quantization="fp8", kv_cache_dtype="fp8"),
        digest(load_format="dummy"),
        digest(runner="simulated"),
        digest(runner="simulated", simulated_seed=1),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(num_blocks=96, max_num_seqs=3) == digests[0]
