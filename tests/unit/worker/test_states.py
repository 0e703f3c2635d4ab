"""Layers that keep a state: what a model of them is made of, what slots keep, and that no token is taken in twice."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from plans import Drive, drive

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.params import Sampling
from contract.domain.plan import Admission, StepPlan
from worker_svc.compute import TorchCompute
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.config import ModelConfig, parse_config
from worker_svc.core.distributed import Group
from worker_svc.core.interface import Limits
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.kv_cache import KVCache, KVCacheShape
from worker_svc.core.layers.delta_rule import delta_rule_state
from worker_svc.core.layers.placement import Placement
from worker_svc.core.memory import MemoryProfile, fit_model_len
from worker_svc.core.runner import ModelRunner
from worker_svc.core.states.slot_states import SlotStates
from worker_svc.core.step_sizes import choose_step_sizes, sizes_between
from worker_svc.products import model_products
from worker_svc.profiling import _full_plan, _long_plan, smaller_steps

FIELDS: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
}
GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def parse(**changes: Any) -> ModelConfig:
    return parse_config({**FIELDS, **changes}, "config.json")


def make_runner(*, left: float = torch.nan, **changes: int) -> ModelRunner:
    """`left`: what is in slots before anything is written there."""
    sizes = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 128}
    limits = Limits(**{**sizes, **changes}, vocab_size=97, has_state=True)
    config, placement = parse(), Placement(torch.device("cpu"), torch.float32)
    model = CausalLM(config.decoder, placement, limits.max_model_len)
    generator = torch.Generator().manual_seed(11)
    for shard in placement.wanted:
        shard.destination.copy_(torch.randn(shard.destination.shape, generator=generator) * 0.3)
    model.prepare()
    cache = KVCache(KVCacheShape(1, 2, 8, limits.block_size, torch.float32), limits.num_blocks + 1, placement.device)
    shape = delta_rule_state(placement, config.decoder.delta_rules)
    assert shape is not None
    states = SlotStates(shape, limits.num_states + 1, placement.device)
    states.seen.fill_(left)
    states.matrices.fill_(left)
    return TorchCompute("").make_runner(model, cache, 4, limits, lambda: 0, num_graphs=0, states=states)


def admission(slot: int, tokens: list[int], computed: int = 0, **rest: Any) -> Admission:
    blocks = np.arange(8 * slot, 8 * slot + -(-len(tokens) // 4), dtype=np.uint32)
    fields = {"sampling": GREEDY, "seed": 0, "block_ids": blocks, "num_prompt_tokens": len(tokens), **rest}
    return Admission(slot=slot, token_ids=np.array(tokens, np.uint32), num_computed_tokens=computed, **fields)


def launch(runner: ModelRunner, step: int, rows: dict[int, int], **changes: Any) -> list[int]:
    slots, num_tokens = (np.array(list(each), np.uint32) for each in (rows.keys(), rows.values()))
    return runner.launch(StepPlan(step, slots=slots, num_tokens=num_tokens, **changes)).result().token_ids.tolist()


def output(prompt: list[int], num: int) -> list[int]:
    sequence = Drive(prompt, num, GREEDY)
    drive(make_runner(left=0.0), [sequence])
    return sequence.output


def test_what_a_sequence_before_has_left_in_a_slot_does_not_matter() -> None:
    runner = make_runner()
    expected = output(PROMPT, 3)
    for step in (1, 3):
        given = {"released_slots": np.array([0], np.uint32)} if step > 1 else {}
        first = launch(runner, step, {0: 7}, admissions=(admission(0, PROMPT),), **given)
        assert [*first, *launch(runner, step + 1, {0: 1})] == expected[:2]


def test_a_preempted_sequence_goes_on_as_it_would_have() -> None:
    runner, expected = make_runner(), output(PROMPT, 3)
    launch(runner, 1, {0: 7}, admissions=(admission(0, PROMPT),))
    again = admission(1, [*PROMPT, *expected[:2]], num_prompt_tokens=7)
    released = {"released_slots": np.array([0], np.uint32), "admissions": (again,)}
    assert launch(runner, 2, {1: 4}, **released) == []
    assert launch(runner, 3, {1: 5}) == expected[2:]


def test_sequences_that_change_slots_take_their_states_along() -> None:
    """As beams do: both go on from what the other's slot had."""
    runner, prompts = make_runner(), (PROMPT, PROMPT[::-1])
    launch(runner, 1, {0: 7, 1: 7}, admissions=tuple(admission(slot, prompts[slot]) for slot in (0, 1)))
    crossed = []
    for slot in (0, 1):
        known = [*prompts[slot], output(prompts[slot], 1)[0]]
        blocks = np.arange(8 * slot, 8 * slot + 2, dtype=np.uint32)
        crossed.append(admission(1 - slot, known, 7, block_ids=blocks, source_state=slot))
    given = {"released_slots": np.array([0, 1], np.uint32), "admissions": tuple(crossed)}
    assert launch(runner, 2, {0: 1, 1: 1}, **given) == [output(prompts[slot], 2)[1] for slot in (1, 0)]


def saving(*pairs: tuple[int, int]) -> dict[str, Any]:
    slots, states = np.array(pairs, np.uint32).T
    return {"save_slots": slots, "save_states": states}


def test_a_sequence_begins_with_a_state_that_another_has_left() -> None:
    """Which goes on, and ends; another gets its slot, and saves its own state."""
    runner, expected = make_runner(num_saved_states=2), output(PROMPT, 2)
    launch(runner, 1, {0: 4}, admissions=(admission(0, PROMPT),), **saving((0, 5)))
    assert [*launch(runner, 2, {0: 3}), *launch(runner, 3, {0: 1})] == expected
    other = admission(0, PROMPT[::-1], block_ids=np.array([8, 9], np.uint32))
    released = {"released_slots": np.array([0], np.uint32), "admissions": (other,)}
    launch(runner, 4, {0: 4}, **released, **saving((0, 4)))
    again = admission(1, PROMPT, 4, block_ids=np.array([0, 20], np.uint32), source_state=5)
    first = launch(runner, 5, {1: 3}, admissions=(again,))
    assert [*first, *launch(runner, 6, {1: 1})] == expected


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([(0, 3)], "saved as 3, which is not there"),
        ([(0, 6)], "saved as 6, which is not there"),
        ([(1, 4)], "computes nothing"),
        ([(0, 4), (0, 4)], "two states"),
    ],
)
def test_states_are_saved_of_slots_that_compute_and_where_there_are_some(
    pairs: list[tuple[int, int]], named: str
) -> None:
    runner = make_runner(num_saved_states=2)
    admissions = admission(0, PROMPT), admission(1, PROMPT)
    with pytest.raises(PenstockError, match=named) as caught:
        launch(runner, 1, {0: 7}, admissions=admissions, **saving(*pairs))
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize("most_copied", [1, 2, 16])
def test_states_are_copied_few_at_a_time(most_copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.core.runner._MOST_COPIED", most_copied)
    runner, prompts = make_runner(num_saved_states=3), (PROMPT, PROMPT[::-1], PROMPT[1:])
    expected = [output(prompt, 1) for prompt in prompts]
    entering = tuple(admission(slot, prompt) for slot, prompt in enumerate(prompts))
    launch(runner, 1, dict.fromkeys(range(3), 4), admissions=entering, **saving((0, 6), (1, 4), (2, 5)))
    again = [
        admission(slot, prompt, 4, block_ids=np.array([8 * slot, 30 + slot], np.uint32), source_state=source)
        for slot, (prompt, source) in enumerate(zip(prompts, (6, 4, 5), strict=True))
    ]
    released = {"released_slots": np.arange(3, dtype=np.uint32), "admissions": tuple(again)}
    rows = {slot: len(prompt) - 4 for slot, prompt in enumerate(prompts)}
    assert launch(runner, 2, rows, **released) == [token for tokens in expected for token in tokens]


@pytest.mark.parametrize(
    ("computed", "source"), [(3, None), (0, 0), (3, 4)], ids=["no state", "nothing computed", "no such slot"]
)
def test_computed_tokens_come_with_a_state(computed: int, source: int | None) -> None:
    with pytest.raises(PenstockError, match="state") as caught:
        launch(make_runner(), 1, {0: 7 - computed}, admissions=(admission(0, PROMPT, computed, source_state=source),))
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_runner_without_states_is_given_none() -> None:
    runner = make_runner()
    runner._host.limits = replace(runner.limits, has_state=False)
    with pytest.raises(PenstockError, match="state"):
        launch(runner, 1, {0: 4}, admissions=(admission(0, PROMPT, 3, source_state=0),))


def test_steps_by_which_memory_is_measured_are_plans_like_others() -> None:
    runner = make_runner()
    kinds = runner.limits.kinds
    smaller = smaller_steps(128, 4, 64)
    assert smaller
    for lengths in smaller:
        assert len(runner.launch(_full_plan(lengths, kinds)).result().token_ids) == len(lengths)
    for plan in (_full_plan([60, 1, 1, 1], kinds), _long_plan(4, 64, kinds, has_state=True)):
        assert len(runner.launch(plan).result().token_ids) == 4


@pytest.mark.parametrize("max_num_batched_tokens", [2, 64, 512, 1536, 16_384])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 256])
@pytest.mark.parametrize("max_model_len", [10, 4096])
def test_smaller_steps_keep_to_all_limits(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
    steps = smaller_steps(max_num_batched_tokens, max_num_seqs, max_model_len)
    assert len(steps) >= len(sizes_between(max_num_batched_tokens))
    for lengths in steps:
        assert sum(lengths) <= max_num_batched_tokens
        assert 0 < len(lengths) <= max_num_seqs
        assert 0 < max(lengths) <= max_model_len


def test_the_state_of_a_sequence_is_that_of_a_rank_s_heads() -> None:
    placement = Placement(torch.device("meta"), torch.bfloat16, Group(1, 2))
    shape = delta_rule_state(placement, parse().decoder.delta_rules)
    assert shape is not None
    assert (shape.num_layers, shape.num_key_heads, shape.num_value_heads, shape.num_channels) == (3, 1, 3, 2 * 8 + 30)
    assert shape.slot_bytes == 3 * (4 * 46 * 2 + 3 * 8 * 10 * 4)
    with pytest.raises(PenstockError, match=r"linear_num_key_heads \(2\) over 4"):
        delta_rule_state(Placement(torch.device("meta"), torch.bfloat16, Group(1, 4)), parse().decoder.delta_rules)
    llama = {**FIELDS, "architectures": ["LlamaForCausalLM"]}
    plain = {name: value for name, value in llama.items() if not name.startswith("linear")}
    assert delta_rule_state(placement, parse_config(plain, "config.json").decoder.delta_rules) is None


def test_layers_of_each_sort_are_compiled_and_have_their_products_in_tables() -> None:
    config, placement = parse(), Placement(torch.device("meta"), torch.bfloat16)
    outline = CausalLM(config.decoder, placement, max_model_len=16).outline()
    assert len(outline._layers) == 2  # the first with a state, and the last
    products = model_products(config, placement)
    assert Product("plain", 2 * 16 + 2 * 60 + 2 * 6, 32) in products
    assert Product("added", 32, 60) in products
    assert Product("plain", 2 * 32 + 2 * 16, 32) in products  # queries and gates, keys and values


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "none of whose layers attends"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types.* 'sliding_attention'"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"linear_gate_rank": 4}, "linear_gate_rank"),
    ],
)
def test_what_is_not_there_fails_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(PenstockError, match=named) as caught:
        parse(**changes)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


def test_values_are_of_whole_key_heads() -> None:
    with pytest.raises(PenstockError, match="linear_num_value_heads"):
        parse(linear_num_value_heads=5)


def test_the_first_layers_have_a_state_where_the_configuration_does_not_list_them() -> None:
    assert len(parse().decoder.delta_rules) == 3
    assert len(parse(full_attention_interval=2).decoder.attentions) == 2


@pytest.mark.parametrize(("most_states", "num_seqs"), [(None, 256), (1000, 256), (100, 96), (5, 16)])
def test_no_more_sequences_run_than_there_are_states_for(most_states: int | None, num_seqs: int) -> None:
    assert choose_step_sizes(1, None, None, 1, most_states).max_num_seqs == num_seqs


def test_what_is_said_of_memory_counts_states() -> None:
    profile = MemoryProfile(0, 0, 0, 400, 100, 4, state_bytes=3 << 20)
    assert "states 3.0 MiB" in profile.describe()
    with pytest.raises(PenstockError, match="or lower max_num_seqs"):
        fit_model_len(200, profile, make_runner().limits.kinds, 64, None, explicit=True)
