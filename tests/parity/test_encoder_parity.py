"""Encoders as transformers' own modules, whose prompts are computed whole: vectors equal those of each prompt alone, or
the architecture is refused by name.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import (
    ENCODERS,
    MAX_POSITIONS,
    REFUSED,
    VOCAB_SIZE,
    EncoderCheckpoint,
    hidden_states,
    save_encoder,
    save_encoder_config,
    save_modules,
)
from safetensors.torch import load_file, save_file
from test_runner_parity import load
from transformers import PreTrainedModel

from contract.domain.errors import ErrorCode
from contract.domain.pooling import VECTOR_KINDS, Pooling, PoolingKind
from penstock import LLM, PenstockError, PoolingParams, SamplingParams
from worker_svc import inspection
from worker_svc.core.encoder import Padded, PaddedPrompts
from worker_svc.core.transformers_models import encoder_proof
from worker_svc.core.transformers_models.encoder import TransformersEncoder
from worker_svc.core.transformers_models.encoder_proof import prove_encoder
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.settings import WorkerSettings

TOLERANCE = 2e-5
POOLINGS = [Pooling(kind, normalize) for kind, normalize in product(VECTOR_KINDS, (True, False))]
POOLINGS += [Pooling(PoolingKind.MEAN, normalize=True, dimensions=5)]
CPU = torch.device("cpu")


def prompts_of(encoder: EncoderCheckpoint, count: int = 24) -> list[list[int]]:
    rng = np.random.default_rng(5)
    lengths = [encoder.longest, 1, 2, encoder.longest - 1, *rng.integers(1, encoder.longest + 1, count - 4).tolist()]
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    for prompt in prompts[::5]:
        prompt[len(prompt) // 2] = encoder.pad_token_id  # as any other token
    return prompts


def expected_vector(model: PreTrainedModel, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    hidden = hidden_states(model, prompt)
    rows = {PoolingKind.LAST: hidden[-1], PoolingKind.MEAN: hidden.mean(0), PoolingKind.CLS: hidden[0]}
    vector = rows[pooling.kind][: pooling.dimensions or None]
    return vector / vector.norm() if pooling.normalize else vector


def assert_near(vector: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(np.array(vector), expected.numpy(), rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def engine_of(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), dtype="float32", **options)


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.name)
def test_vectors_are_those_of_each_prompt_by_itself(encoder: EncoderCheckpoint, tmp_path: Path) -> None:
    model = save_encoder(tmp_path, encoder)
    llm = engine_of(tmp_path, max_num_batched_tokens=200, max_num_seqs=7)
    engine = llm.llm_engine
    prompts = prompts_of(encoder)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params, pooling=POOLINGS[index % len(POOLINGS)])
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    for index, prompt in enumerate(prompts):
        assert_near(ended[f"{index}"].vector, expected_vector(model, prompt, POOLINGS[index % len(POOLINGS)]))
    stats = engine.stats()
    assert stats.workers["local"].last_step > 3  # several prompts in a step, in several steps
    assert stats.workers["local"].last_step < len(prompts)


@pytest.mark.parametrize("name", ["bert", "modernbert_windows"])
def test_a_checkpoint_with_the_head_of_masked_tokens_gives_the_same(name: str, tmp_path: Path) -> None:
    encoder = named(name)
    model = save_encoder(tmp_path, encoder, with_head=True)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("ForMaskedLM")
    prompts = prompts_of(encoder)[:6]
    outputs = engine_of(tmp_path).embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_near(output.outputs.embedding, expected_vector(model, prompt, Pooling(PoolingKind.CLS)))


@pytest.mark.parametrize(
    ("mode", "normalize", "kind"),
    [
        (None, True, PoolingKind.CLS),
        ("mean_tokens", False, PoolingKind.MEAN),
        ("cls_token", True, PoolingKind.CLS),
        ("lasttoken", True, PoolingKind.LAST),
    ],
)
def test_the_checkpoint_says_how_prompts_are_pooled_and_without_a_word_the_first_state_counts(
    mode: str | None, normalize: bool, kind: PoolingKind, tmp_path: Path
) -> None:
    model = save_encoder(tmp_path, named("bert"))
    if mode is not None:
        save_modules(tmp_path, mode, normalize=normalize)
    prompt = [7, 8, 9, 10, 11]
    llm = engine_of(tmp_path)
    (plain,) = llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
    assert_near(plain.outputs.embedding, expected_vector(model, prompt, Pooling(kind, normalize)))
    asked = PoolingParams(pooling_type="MEAN", normalize=True, dimensions=3)
    (other,) = llm.embed([{"prompt_token_ids": prompt}], pooling_params=asked, use_tqdm=False)
    assert_near(other.outputs.embedding, expected_vector(model, prompt, Pooling(PoolingKind.MEAN, True, 3)))


def test_the_bound_of_a_prompt_is_told_and_positions_for_padding_are_none(tmp_path: Path) -> None:
    encoder = named("xlm_roberta")
    model = save_encoder(tmp_path, encoder)
    llm = engine_of(tmp_path)
    assert llm.llm_engine.runner.limits.max_model_len == MAX_POSITIONS - 2
    prompt = list(range(5, 5 + MAX_POSITIONS))
    with pytest.raises(PenstockError, match=f"maximum context length is {MAX_POSITIONS - 2} tokens") as caught:
        llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    (cut,) = llm.embed([{"prompt_token_ids": prompt}], truncate_prompt_tokens=-1, use_tqdm=False)
    assert_near(cut.outputs.embedding, expected_vector(model, prompt[2:], Pooling(PoolingKind.CLS)))
    with pytest.raises(
        PenstockError, match=rf"max_model_len {MAX_POSITIONS} exceeds the {MAX_POSITIONS - 2} positions"
    ):
        engine_of(tmp_path, max_model_len=MAX_POSITIONS)


def test_tokens_of_a_step_bound_prompts_unless_more_were_asked_for(tmp_path: Path) -> None:
    save_encoder(tmp_path, named("bert"))
    assert engine_of(tmp_path).llm_engine.runner.limits.max_num_batched_tokens >= MAX_POSITIONS
    llm = engine_of(tmp_path, max_num_batched_tokens=20)
    with pytest.raises(PenstockError, match="maximum context length is 20 tokens"):
        llm.embed([{"prompt_token_ids": [5] * 21}], use_tqdm=False)
    with pytest.raises(PenstockError, match="max_num_batched_tokens 20 are fewer than max_model_len 30"):
        engine_of(tmp_path, max_num_batched_tokens=20, max_model_len=30)


def test_nothing_is_generated_and_vectors_are_made_all_the_same(tmp_path: Path) -> None:
    save_encoder(tmp_path, named("bert"))
    llm = engine_of(tmp_path)
    with pytest.raises(PenstockError, match="is an encoder, which makes vectors"):
        llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False)
    assert len(llm.embed([{"prompt_token_ids": [5]}], use_tqdm=False)) == 1
    one, other = llm.score("a", ["a", "b"], use_tqdm=False)
    assert one.outputs.score == pytest.approx(1.0)
    assert other.outputs.score < 0.999


@pytest.mark.parametrize(("encoder", "why"), REFUSED, ids=lambda each: getattr(each, "name", ""))
def test_what_would_be_wrong_is_refused_by_name(encoder: EncoderCheckpoint, why: str, tmp_path: Path) -> None:
    save_encoder_config(tmp_path, encoder)
    with pytest.raises(PenstockError, match=rf"model architecture {encoder.config}\w* .*{why}"):
        load(tmp_path, num_blocks=None)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_blocks": 10}, "num_blocks for an encoder"),
        ({"kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes for an encoder"),
        ({"attention": "triton"}, "attention 'triton' for an encoder"),
        ({"prefill_attention": "flash_attn"}, "prefill_attention 'flash_attn' for an encoder"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"quantization": "fp8"}, "quantization 'fp8'"),
    ],
)
def test_what_encoders_do_not_have_is_refused_by_name(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_encoder_config(tmp_path, named("bert"))
    with pytest.raises(PenstockError, match=why):
        load(tmp_path, **({"num_blocks": None} | options))


def test_tensors_that_hidden_states_need_must_be_there_and_others_need_not(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, named("bert"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    without_pooler = {name: each for name, each in tensors.items() if not name.startswith("pooler.")}
    assert len(without_pooler) < len(tensors)
    save_file(without_pooler, file, {"format": "pt"})
    (output,) = engine_of(tmp_path).embed([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    assert_near(output.outputs.embedding, expected_vector(model, [5, 6], Pooling(PoolingKind.CLS)))
    lacking = {name: each for name, each in tensors.items() if "layer.2.output.dense.bias" not in name}
    save_file(lacking, file, {"format": "pt"})
    with pytest.raises(PenstockError, match=r"lacks the tensor .*layer\.2\.output\.dense\.bias"):
        load(tmp_path, num_blocks=None)
    save_file(tensors | {"encoder.layer.0.extra": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(PenstockError, match=r"that the model does not have: encoder\.layer\.0\.extra"):
        load(tmp_path, num_blocks=None)


def test_half_precision_stays_close(tmp_path: Path) -> None:
    encoder = named("modernbert_windows")
    model = save_encoder(tmp_path, encoder)
    prompts = prompts_of(encoder)[:8]
    outputs = LLM(str(tmp_path), dtype="bfloat16").embed(
        [{"prompt_token_ids": each} for each in prompts], use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = expected_vector(model, prompt, Pooling(PoolingKind.CLS))
        assert float(expected @ torch.tensor(output.outputs.embedding)) > 0.995


def test_an_encoder_is_described_without_its_weights(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, named("bert"))
    found = inspection.inspect(WorkerSettings(model=str(tmp_path), device="cpu", redis_url="unix:///nowhere"))
    assert (found["architecture"], found["implementation"], found["layers"]) == ("BertModel", "transformers", 3)
    assert found["memory_bytes"] == 4 * model.num_parameters()


def named(name: str) -> EncoderCheckpoint:
    (encoder,) = (each for each in ENCODERS if each.name == name)
    return encoder


def sees_what_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PaddedPrompts.on

    def on(self: PaddedPrompts, *columns: torch.Tensor) -> Padded:
        padded = exact(self, *columns)
        return padded._replace(mask=torch.ones_like(padded.mask))

    monkeypatch.setattr(PaddedPrompts, "on", on)


def sees_one_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PaddedPrompts.on
    monkeypatch.setattr(
        PaddedPrompts, "on", lambda self, ids, lengths, *others: exact(self, ids, (lengths - 1).clamp(min=1), *others)
    )


def counts_positions_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: TransformersEncoder, prompts: Padded) -> torch.Tensor:
        positions = torch.arange(prompts.token_ids.shape[1]).expand_as(prompts.token_ids)
        found: torch.Tensor = self._module(
            input_ids=prompts.token_ids, attention_mask=prompts.mask.long(), position_ids=positions
        ).last_hidden_state
        return found

    monkeypatch.setattr(TransformersEncoder, "forward", forward)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (sees_what_fills, "bert"),
        (sees_what_fills, "modernbert_windows"),
        (sees_one_token_less, "xlm_roberta"),
        (counts_positions_otherwise, "xlm_roberta"),
    ],
)
def test_the_proof_sees_wrong_masks_and_positions(mistake: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = named(name).make_config()
    assert prove_encoder(config, MAX_POSITIONS, CPU, torch.float32).error < TOLERANCE
    mistake(monkeypatch)
    with pytest.raises(NotDoneError, match="gives prompts of several lengths in a matrix other hidden states"):
        prove_encoder(config, MAX_POSITIONS, CPU, torch.float32)


def test_a_device_is_proved_too_in_the_dtype_that_is_used_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config, where = named("bert").make_config(), []

    def wrong_there(*args: Any) -> float:
        where.append(args[3:])
        return float("nan") if args[3:] else 0.0

    monkeypatch.setattr(encoder_proof, "worst_error", wrong_there)
    assert prove_encoder(config, MAX_POSITIONS, CPU, torch.float32).error == 0.0
    with pytest.raises(NotDoneError, match="other hidden states on meta: off by nan"):
        prove_encoder(config, MAX_POSITIONS, torch.device("meta"), torch.bfloat16)
    assert where == [(), (), (torch.device("meta"),)]


def test_what_is_proved_is_the_whole_configuration(tmp_path: Path) -> None:
    proof = prove_encoder(named("modernbert_windows").make_config(), MAX_POSITIONS, CPU, torch.float32)
    assert proof.num_layers >= 2
    roberta = prove_encoder(named("xlm_roberta").make_config(), MAX_POSITIONS, CPU, torch.float32)
    assert (roberta.num_reserved, proof.num_reserved) == (2, 0)
    assert roberta.unused == {"pooler.dense.weight", "pooler.dense.bias"}
    assert replace(proof, error=0.0).num_tokens > 200
