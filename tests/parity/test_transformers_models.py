"""Decoders as transformers' own modules over paged attention: equal to what they are by themselves, or refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from checkpoints import STATE, VARIANTS, VOCAB_SIZE, save_checkpoint
from modules import DECODERS, MAX_POSITIONS, REFUSED, Decoder, save_config, save_module
from plans import Drive, drive
from teacher import Answered, expected_logprobs, logprob_errors
from test_runner_parity import load

from contract.domain.params import Sampling, SamplingParams
from penstock import LLM, PenstockError
from penstock.launcher.layout import BUNDLED_MODEL
from worker_svc import transformers_loading
from worker_svc.core.attention import torch_backend
from worker_svc.core.rehearsal import rehearse
from worker_svc.core.transformers_models.attention import AttentionCall, register
from worker_svc.core.transformers_models.masks import Mask
from worker_svc.core.transformers_models.proof import prove, worst_error
from worker_svc.core.transformers_models.refusal import NotDoneError

NUM_TOP, MAX_TOKENS = 5, 5
TOLERANCE = 1e-4
# But those whose layers keep a state: blocks that prompts share are of no use to these.
_FAMILIES = {each.family: each for each in reversed(VARIANTS) if STATE not in each.options.get("layer_types", ())}
_SMALL = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 4, "max_model_len": 64}


def test_no_decoder_here_is_of_a_family_of_ours() -> None:
    from worker_svc.core.models import FAMILIES

    assert len(DECODERS) >= 12
    assert not {f"{each.config}ForCausalLM" for each in DECODERS} & FAMILIES.keys()


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_tokens_and_logprobs_equal_the_module_by_itself(decoder: Decoder, tmp_path: Path) -> None:
    module = save_module(tmp_path, decoder)
    loaded = load(tmp_path, max_model_len=MAX_POSITIONS)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCAB_SIZE, length).tolist() for length in (1, 17, 90, 300)]
    sequences = [Drive(each, MAX_TOKENS, Sampling(temperature=0.0, num_logprobs=NUM_TOP)) for each in prompts]
    stats = drive(loaded.runner, sequences, chunk=64, window=2, stagger=1)
    assert stats.num_chunked > 0
    assert stats.num_mixed > 0
    for sequence in sequences:
        answer = Answered.of(sequence)
        expected = expected_logprobs(module, answer)
        assert sequence.output == expected.argmax(-1).tolist()
        assert float(logprob_errors(expected, answer, NUM_TOP).max()) < TOLERANCE


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_half_precision_stays_close(decoder: Decoder, tmp_path: Path) -> None:
    module = save_module(tmp_path, decoder)
    loaded = load(tmp_path, dtype="bfloat16", max_model_len=MAX_POSITIONS)
    prompt = np.random.default_rng(3).integers(3, VOCAB_SIZE, 60).tolist()
    (sequence,) = sequences = [Drive(prompt, MAX_TOKENS, Sampling(temperature=0.0, num_logprobs=NUM_TOP))]
    drive(loaded.runner, sequences, chunk=32)
    answer = Answered.of(sequence)
    errors = logprob_errors(expected_logprobs(module.bfloat16(), answer), answer, NUM_TOP)
    assert float(errors.max()) < 0.5


@pytest.mark.parametrize(("decoder", "why"), REFUSED, ids=lambda each: getattr(each, "name", ""))
def test_what_would_be_wrong_is_refused_by_name_before_weights_are_looked_for(
    decoder: Decoder, why: str, tmp_path: Path
) -> None:
    save_config(tmp_path, decoder)
    past = 512 if decoder.name == "dynamic_rope" else None
    with pytest.raises(PenstockError, match=rf"model architecture {decoder.config.removesuffix('Text')}\w+ .*{why}"):
        load(tmp_path, model_impl="transformers", max_model_len=past)


def test_chunks_that_no_context_passes_are_none(tmp_path: Path) -> None:
    (chunks,) = (decoder for decoder, _ in REFUSED if decoder.name == "llama4_chunks")
    save_module(tmp_path, chunks)
    options = {"model_impl": "transformers"}
    assert load(tmp_path, max_model_len=16, **options).runner.limits.max_model_len == 16
    with pytest.raises(PenstockError, match="in chunks"):
        load(tmp_path, max_model_len=17, **options)


@pytest.mark.parametrize("variant", _FAMILIES.values(), ids=lambda variant: variant.name)
def test_families_of_ours_go_through_the_same_rehearsal(variant: object, tmp_path: Path) -> None:
    eager = save_checkpoint(tmp_path, variant)  # type: ignore[arg-type]
    lines = rehearse(load(tmp_path, **_SMALL).runner)
    assert sum(len(line.logprobs) for line in lines) >= 100
    assert worst_error(eager, lines) < TOLERANCE


def named(name: str) -> Decoder:
    (decoder,) = (each for each in DECODERS if each.name == name)
    return decoder


def windowless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mask, "window", lambda self, length: None)


def one_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Mask.window

    def wider(self: Mask, length: int) -> int | None:
        window = exact(self, length)
        return window and window + 1

    monkeypatch.setattr(Mask, "window", wider)


def uncapped(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch_backend._attend
    monkeypatch.setattr(
        torch_backend, "_attend", lambda kind, *args, **kwargs: exact(replace(kind, softcap=None), *args, **kwargs)
    )


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch_backend._attend
    monkeypatch.setattr(
        torch_backend,
        "_attend",
        lambda kind, *args, **kwargs: exact(replace(kind, scale=kind.scale * 1.01), *args, **kwargs),
    )


@pytest.mark.parametrize("mistake", [windowless, one_wider, uncapped, scaled], ids=lambda each: each.__name__)
def test_the_proof_sees_attention_that_is_not_what_was_asked_for(
    mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    config = named("vaultgemma_caps").make_config()
    assert prove(config, MAX_POSITIONS).error < TOLERANCE
    mistake(monkeypatch)  # type: ignore[operator]
    with pytest.raises(NotDoneError, match=r"differs|tells its attention function"):
        prove(config, MAX_POSITIONS)


def test_attention_of_the_whole_model_that_its_tiny_instance_did_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_module(tmp_path, named("starcoder2_window"))
    exact = transformers_loading.prove
    monkeypatch.setattr(
        transformers_loading, "prove", lambda *args: replace(exact(*args), features=frozenset({("sinks",)}))
    )
    with pytest.raises(PenstockError, match="attends as its tiny instance did not"):
        load(tmp_path)
    assert AttentionCall(1, 1, 8, 8, 1.0, 4, None, has_sinks=True).features == ("window", "sinks")


def test_a_family_of_ours_gives_the_same_tokens_both_ways() -> None:
    prompts = np.random.default_rng(7).integers(3, VOCAB_SIZE, (6, 40)).tolist()
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    outputs = [
        LLM(str(BUNDLED_MODEL), model_impl=each, num_blocks=200).generate(prompts, params, use_tqdm=False)
        for each in ("penstock", "transformers")
    ]
    first, second = ([output.outputs[0].token_ids for output in each] for each in outputs)
    assert first == second


# Where all layers have a window, a sequence holds fewer blocks, and it is short ones that want more as they grow.
@pytest.mark.parametrize(("name", "num_blocks"), [("gpt2", 36), ("starcoder2_window", 12), ("minicpm3_latent", 36)])
def test_llm_generates_as_transformers_does_and_embeds(name: str, num_blocks: int, tmp_path: Path) -> None:
    module = save_module(tmp_path, named(name))
    write_tokenizer(tmp_path)
    limits = {"block_size": 4, "num_blocks": num_blocks, "max_num_batched_tokens": 16, "max_model_len": 140}
    llm = LLM(str(tmp_path), dtype="float32", **limits)  # type: ignore[arg-type]
    rng = np.random.default_rng(5)
    long = rng.integers(3, VOCAB_SIZE, 60).tolist()
    prompts = [long, [*long[:40], 7, 9], rng.integers(3, VOCAB_SIZE, 50).tolist(), [5], [6], [7], [8]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):  # then prefixes are in the cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = module.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    counters = llm.llm_engine.stats().counters
    assert counters.num_preemptions > 0
    assert counters.num_cached_tokens > 0
    (embedded,) = llm.embed([{"prompt_token_ids": long}], use_tqdm=False)
    hidden = module.base_model(torch.tensor([long])).last_hidden_state[0, -1].double()
    assert embedded.outputs.embedding == pytest.approx((hidden / hidden.norm()).tolist(), abs=1e-5)
