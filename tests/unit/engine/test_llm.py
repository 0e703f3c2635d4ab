"""`LLM`: forms of prompts, order of outputs, arguments that are wrong or not there yet, checkpoints that are broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engines import CHAT_TEMPLATE, expected, make_vocabulary, token_ids

from contract.domain.errors import ErrorCode, Fault
from penstock import LLM, PenstockError, SamplingParams
from penstock.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=8)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Everything but weights: enough for the simulated runner."""
    make_vocabulary().tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE}))
    return tmp_path


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), runner="simulated")


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[i, i + 1] for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=20 - i) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [token_ids(output) for output in outputs] == [expected(prompt, 20 - i) for i, prompt in enumerate(prompts)]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    "prompts",
    ["hi", ["hi"], [71, 72], [[71, 72]], (71, 72), {"prompt": "hi"}, [{"prompt_token_ids": [71, 72]}]],
)
def test_one_prompt_may_be_given_in_every_form(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hi").ids
    assert token_ids(output) == expected(output.prompt_token_ids, 8)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_a_chat_may_bring_a_template_of_its_own(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert output.prompt_token_ids == llm.get_tokenizer().encode("hi!").ids
    with pytest.raises(PenstockError, match="not valid Jinja") as caught:
        llm.chat(chat, GREEDY, use_tqdm=False, chat_template="{% if %}")
    assert caught.value.param is not None
    assert "chat_template" in caught.value.param


def test_a_chat_goes_through_the_template(llm: LLM) -> None:
    message = {"role": "user", "content": "hi"}
    (single,) = llm.chat([message], GREEDY, use_tqdm=False)
    assert llm.get_tokenizer().decode(single.prompt_token_ids) == "<user>hi<a>"
    pair = llm.chat([[message], [message, {"role": "user", "content": "more"}]], GREEDY, use_tqdm=False)
    assert token_ids(pair[0]) == token_ids(single)
    assert llm.get_tokenizer().decode(pair[1].prompt_token_ids) == "<user>hi<user>more<a>"


def test_the_bar_shows_the_speed_of_prefill_and_decode(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a prompt", "another one"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "prefill" in shown
    assert "decode" in shown
    llm.generate(["a prompt"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_the_same_seed_gives_the_same_samples(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=6, n=2)

    def samples(seed: int) -> list[list[int]]:
        llm = LLM(str(checkpoint), runner="simulated", seed=seed)
        return [
            output.token_ids for each in llm.generate(["a", "a"], params, use_tqdm=False) for output in each.outputs
        ]

    assert samples(3) == samples(3)
    assert samples(3) != samples(4)
    assert len({tuple(sample) for sample in samples(3)}) == 4


@pytest.mark.parametrize(
    ("prompts", "index", "what"),
    [
        (["fine", ""], 1, "empty"),
        (["fine", "fine", [300]], 2, "300"),
        ([[1] * 256, "fine"], 0, "256"),
        (["fine", None], 1, "list of token ids"),
        (["fine", {"text": "x"}], 1, "'text'"),
        (["fine", ["a", "b"]], 1, "list of token ids"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_index_and_spoils_nothing(llm: LLM, prompts: Any, index: int, what: str) -> None:
    with pytest.raises(PenstockError, match=what) as raised:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert raised.value.message.startswith(f"prompts[{index}]: ")
    assert raised.value.fault is Fault.CALLER
    (output,) = llm.generate("hi", GREEDY, use_tqdm=False)
    assert token_ids(output) == expected(output.prompt_token_ids, 8)


def test_a_text_with_a_token_that_the_model_does_not_have_spoils_nothing(checkpoint: Path) -> None:
    tokenizer = make_vocabulary().tokenizer
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    llm = LLM(str(checkpoint), runner="simulated")
    with pytest.raises(PenstockError, match="'<image>' with the id 257") as raised:
        llm.generate(["fine", "an <image>"], GREEDY, use_tqdm=False)
    assert raised.value.fault is Fault.CALLER
    (output,) = llm.generate("hi", GREEDY, use_tqdm=False)
    assert token_ids(output) == expected(output.prompt_token_ids, 8)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "at least one"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([[{"role": "user", "content": "x"}], ["x"]], r"conversations\[1\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_malformed_chats_are_refused(llm: LLM, messages: Any, what: str) -> None:
    with pytest.raises(PenstockError, match=what):
        llm.chat([messages] if messages == [] else messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, GREEDY, GREEDY], "greedy", [GREEDY, None]])
def test_sampling_params_must_fit_the_prompts(llm: LLM, params: Any) -> None:
    with pytest.raises(PenstockError) as raised:
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert raised.value.param == "sampling_params"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 1e9),
        ("frequency_penalty", float("-inf")),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 10**6),
        ("seed", 2**63),
        ("logprobs", -1),
        ("stop", [""]),
        ("logit_bias", {1: float("nan")}),
    ],
)
def test_sampling_params_out_of_bounds_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(PenstockError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, "hot") for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "seed")),
        *((name, [1]) for name in ("presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "logprobs")),
        *((name, True) for name in ("temperature", "logprobs", "stop", "stop_token_ids", "logit_bias")),
        *((name, None) for name in ("temperature", "top_p", "n", "min_tokens", "ignore_eos", "skip_special_tokens")),
        *((name, 1) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "stop")),
        ("stop", [5]),
        ("stop", {"a"}),
        ("stop_token_ids", "12"),
        ("stop_token_ids", ["1"]),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "b"}),
    ],
)
def test_sampling_params_of_a_wrong_type_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(PenstockError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field
    assert raised.value.fault is Fault.CALLER


def test_what_is_the_callers_fault_is_a_value_error(checkpoint: Path, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temperature") as raised:
        SamplingParams(temperature=-1)
    assert isinstance(raised.value, PenstockError)
    with pytest.raises(ValueError, match=r"prompts\[0\]"):
        llm.generate([[9999]], use_tqdm=False)
    with pytest.raises(PenstockError) as operators:
        LLM(str(tmp_path / "nothing"))
    assert not isinstance(operators.value, ValueError)


def test_priorities_count_where_the_policy_knows_them_and_are_refused_by_name_elsewhere(
    checkpoint: Path, llm: LLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(PenstockError, match="served in the order in which they come") as raised:
        llm.generate([[1, 2], [3, 4]], params, priority=[0, 1], use_tqdm=False)
    assert raised.value.param == "priority"
    assert len(llm.generate([[1, 2], [3, 4]], params, priority=[0, 0], use_tqdm=False)) == 2
    by_priority = LLM(str(checkpoint), runner="simulated", scheduling_policy="priority", max_num_seqs=1)
    ended: list[str] = []
    step = by_priority.llm_engine.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        ended.extend(output.request_id for output in outputs if output.finished)
        return outputs

    by_priority.llm_engine.step = watched  # type: ignore[method-assign]
    outputs = by_priority.generate([[1, 2], [3, 4], [5, 6]], params, priority=[5, -1, 0], use_tqdm=False)
    assert ended == [outputs[index].request_id for index in (1, 2, 0)]


def test_max_tokens_beyond_the_context_are_what_it_leaves(llm: LLM) -> None:
    (output,) = llm.generate([[1] * 250], SamplingParams(temperature=0, max_tokens=1000), use_tqdm=False)
    assert len(token_ids(output)) == 6
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(PenstockError, match="min_tokens is 7"):
        llm.generate([[1] * 250], SamplingParams(min_tokens=7, max_tokens=1000), use_tqdm=False)


@pytest.mark.parametrize("dtype", ["half", "float", "float16", "torch.bfloat16", "auto"])
def test_dtypes_have_the_names_of_torch(checkpoint: Path, dtype: str) -> None:
    assert LLM(str(checkpoint), runner="simulated", dtype=dtype).llm_engine


def test_the_tokenizer_applies_the_models_chat_template(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<user>hi"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<user>hi<a>"
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == ids
    with pytest.raises(PenstockError, match="at least one message"):
        tokenizer.apply_chat_template([])


def test_none_asks_for_no_stops_and_no_bias_as_in_vllm(llm: LLM) -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, temperature=0, max_tokens=8)
    assert (params.text, params.stopping, params.sampling) == (GREEDY.text, GREEDY.stopping, GREEDY.sampling)
    (output,) = llm.generate("hi", params, use_tqdm=False)
    assert token_ids(output) == expected(output.prompt_token_ids, 8)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"swap_space": 4}, "swap_space"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode"),
    ],
)
def test_what_is_not_there_yet_fails_by_name(checkpoint: Path, arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(PenstockError, match=what) as raised:
        LLM(str(checkpoint), **arguments)
    assert raised.value.code is ErrorCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 0},
        {"block_size": -1},
        {"plans_in_flight": 0},
        {"num_blocks": 1.5},
        {"max_num_batched_tokens": True},
        {"kv_cache_memory_bytes": 0},
        {"gpu_memory_utilization": float("nan")},
        {"scheduling_policy": "luck"},
        {"dtype": "int8"},
        {"num_threads": 0},
        {"runner": "abacus"},
        {"step_ms": -1.0},
    ],
)
def test_wrong_arguments_are_named(checkpoint: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(PenstockError) as raised:
        LLM(str(checkpoint), **{"runner": "simulated", **arguments})
    assert raised.value.param == next(iter(arguments))
    assert raised.value.fault is Fault.CALLER


def test_a_context_beyond_the_models_is_refused(checkpoint: Path) -> None:
    with pytest.raises(PenstockError, match="257"):
        LLM(str(checkpoint), runner="simulated", max_model_len=257)


def test_a_missing_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="does not exist") as raised:
        LLM(str(tmp_path / "nothing"))
    assert raised.value.fault is Fault.OPERATOR


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
        ("config.json", json.dumps({**CONFIG, "quantization_config": {"quant_method": "gptq"}}), "gptq"),
        ("config.json", json.dumps({**CONFIG, "hidden_size": None}), "hidden_size"),
        ("tokenizer.json", "nonsense", "tokenizer.json"),
        ("model.safetensors", "nonsense", "model.safetensors"),
        (None, None, "model.safetensors is missing"),
    ],
)
def test_a_broken_checkpoint_is_named(checkpoint: Path, file: str | None, content: str | None, what: str) -> None:
    if file is not None:
        (checkpoint / file).write_text(content or "")
    with pytest.raises(PenstockError, match=what):
        LLM(str(checkpoint))


@pytest.mark.parametrize("prompts", [None, 5, 2.5])
def test_what_is_no_prompt_at_all_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(PenstockError, match="prompts are text, token ids or a list of them"):
        llm.generate(prompts, use_tqdm=False)


def test_without_parameters_the_models_defaults_hold(checkpoint: Path) -> None:
    stated = {"temperature": 0.0, "max_new_tokens": 5, "suppress_tokens": [3]}
    (checkpoint / "generation_config.json").write_text(json.dumps(stated))
    llm = LLM(str(checkpoint), runner="simulated")
    defaults = SamplingParams(temperature=0.0, max_tokens=5, suppress_tokens=(3,))
    assert llm.get_default_sampling_params() == defaults
    (output,) = llm.generate([71, 72], use_tqdm=False)
    assert token_ids(output) == expected([71, 72], 5)
    (chat,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    assert len(token_ids(chat)) == 5
    (explicit,) = llm.generate([71, 72], SamplingParams(temperature=0), use_tqdm=False)
    assert len(token_ids(explicit)) == 16, "what is given counts as it is"


@pytest.mark.parametrize("choice", ["openai", "vllm"])
def test_defaults_may_be_those_of_openai(checkpoint: Path, choice: str) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    llm = LLM(str(checkpoint), runner="simulated", generation_config=choice)
    assert llm.get_default_sampling_params() == SamplingParams()


def test_defaults_are_the_models_where_the_tokenizer_is_anothers(checkpoint: Path, tmp_path_factory: Any) -> None:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (checkpoint / "generation_config.json").write_text(json.dumps({"temperature": 0.9}))
    llm = LLM(str(model), tokenizer=str(checkpoint), runner="simulated")
    assert llm.get_default_sampling_params().temperature == 0.5
