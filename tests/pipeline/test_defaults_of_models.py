"""A model's generation_config.json holds through all services."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_model
from in_memory import Pipeline

from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from servicekit.lifecycle import Stop
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.service import TokenizerService
from tokenizer_svc.settings import TokenizerSettings

WORKER = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 8}


def test_a_call_that_says_nothing_generates_as_the_models_makers_wish(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 23}))
    with Pipeline(tmp_path, worker={**WORKER, "max_model_len": 64}) as pipeline:

        def count(**fields: Any) -> int:
            url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions"
            reply = httpx.post(url, json={"ignore_eos": True, **fields}, timeout=300).raise_for_status().json()
            found: int = reply["usage"]["completion_tokens"]
            return found

        assert count(prompt=[1, 2, 3]) == 23
        assert count(prompt=[1, 2, 3], max_tokens=4) == 4
        assert count(prompt=[1] * 60) == 4, "nobody asked for more than the context leaves"
        first, second = (pipeline.client.complete("hi", {"ignore_eos": True}) for _ in range(2))
        assert first.outputs[0].token_ids == second.outputs[0].token_ids, "greedy, whatever the seed"
        assert len(first.outputs[0].token_ids) == 23
        explicit = pipeline.client.complete("hi", SamplingParams(ignore_eos=True))
        assert len(explicit.outputs[0].token_ids) == 16


def test_a_tokenizer_with_other_defaults_cannot_start_beside_others(tmp_path: Path) -> None:
    write_byte_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    with Pipeline(tmp_path, worker=WORKER) as pipeline:
        settings = TokenizerSettings(name="other", model=str(tmp_path), generation_config="openai")
        vocabulary = load_vocabulary(settings.model, generation_config=settings.generation_config)
        with pytest.raises(PenstockError, match=r"generation_defaults is .*: give all tokenizers of a pool the same"):
            TokenizerService(settings, pipeline.bus, vocabulary).run(Stop())
