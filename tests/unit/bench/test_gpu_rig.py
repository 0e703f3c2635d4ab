"""What `penstock bench gpu` counts is what there was, however the bytes arrive; floors follow from sizes."""

import asyncio
import json
import math
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import gpu
from bench.gpu import works_of
from bench.rig.checkpoint import write_tokenizer
from bench.rig.completions import Connection
from bench.rig.drawn_shapes import find_shape
from bench.rig.engines import max_model_len
from bench.rig.random_weights import write
from bench.rig.shapes import SHAPES, write_shape
from bench.rig.skew import shares
from bench.rig.work import Ceilings, as_text, floor_s, make_work
from penstock import LLM, SamplingParams
from servicekit.checkpoint.model import read_checkpoint
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.kernels.linear.table import Card
from worker_svc.core.layers.placement import Placement
from worker_svc.core.operations import torch_experts
from worker_svc.core.operations.interface import RouterLayer
from worker_svc.core.operations.torch_experts import choose_experts
from worker_svc.factory import load_runner
from worker_svc.model_config import read_model_config
from worker_svc.runner_options import RunnerOptions
from worker_svc.tuning import packaged_lines

STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'1e\r\ndata: {"choices":[{"text":"a"}]}\n\n\r\n'
    b'1e\r\ndata: {"choices":[{"text":"0"}]}\n\n\r\n'
    b'3c\r\ndata: {"choices":[],"usage":{"completion_tokens": 2}}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'
)


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.num_sent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_sent += 1


@pytest.mark.parametrize("piece", [1, 2, 7, 50, 1000])
def test_events_and_usage_are_found_in_pieces_of_any_length(piece: int) -> None:
    async def run() -> list[list[Any]]:
        found: list[list[Any]] = []
        connection, transport = Connection(deque([b"first", b"second"]), found), Transport()
        connection.connection_made(transport)
        connection.send_next()
        for _ in range(2):
            for first in range(0, len(STREAM), piece):
                connection.data_received(STREAM[first : first + piece])
        await connection.ended
        assert transport.num_sent == 2
        return found

    found = asyncio.run(run())
    assert [each[3:] for each in found] == [[4, 2, []], [4, 2, []]]


def test_gaps_are_those_between_tokens_not_before_the_usage_and_the_end() -> None:
    async def run() -> list[list[Any]]:
        found: list[list[Any]] = []
        connection = Connection(deque([b"request"]), found, keeps_gaps=True)
        connection.connection_made(Transport())
        connection.send_next()
        for byte in STREAM:
            connection.data_received(bytes([byte]))
        await connection.ended
        return found

    [(_, first_s, last_s, num_events, num_tokens, gaps_s)] = asyncio.run(run())
    assert (num_events, num_tokens, len(gaps_s)) == (4, 2, 1)
    assert 0 <= gaps_s[0] <= last_s - first_s


def test_requests_of_a_rate_come_at_random_times_and_have_the_lengths_of_the_row() -> None:
    work = make_work("rate")
    assert work.arrivals_s is not None
    assert len(work.arrivals_s) == len(work.prompts) == len(work.num_tokens)
    assert sorted(work.arrivals_s) == work.arrivals_s
    assert len(work.arrivals_s) / work.arrivals_s[-1] == pytest.approx(16, rel=0.1)
    assert {len(prompt) < 410 or len(prompt) > 1638 for prompt in work.prompts} == {False}
    assert {num < 102 or num > 410 for num in work.num_tokens} == {False}


def test_every_id_of_a_model_with_texts_has_one(tmp_path: Path) -> None:
    write_shape(tmp_path, SHAPES["8b-text"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES["8b-text"].vocab_size
    assert all(tokenizer.decode_batch([[31_999], [32_000], [151_932]]))
    assert tokenizer.encode("import os").ids == tokenizer.encode("import os", add_special_tokens=False).ids


def test_a_refusal_ends_the_client() -> None:
    async def run() -> None:
        connection = Connection(deque([b"request"]), [])
        connection.connection_made(Transport())
        connection.send_next()
        connection.data_received(b'HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{"error": "full"}')
        await connection.ended

    with pytest.raises(ConnectionError, match="429"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("0.6b", 0.596, 28 * 8 * 128 * 4),
        ("8b", 7.57, 36 * 8 * 128 * 4),
        ("llama-1b", 1.24, 16 * 8 * 64 * 4),
        ("llama-8b", 7.5, 32 * 8 * 128 * 4),
        ("qwen-7b", 7.07, 28 * 4 * 128 * 4),
        ("30b-a3b", 30.2, 48 * 4 * 128 * 4),
        ("30b-a3b-awq", 30.2, 48 * 4 * 128 * 4),
        ("gemma-4b", 3.88, 34 * 4 * 256 * 4),
        ("v2-lite", 15.5, 27 * 576 * 2),
        ("gpt-oss-20b", 20.3, 24 * 8 * 64 * 4),
    ],
)
def test_sizes_are_those_of_the_published_models(name: str, billions: float, kv_bytes: int) -> None:
    """Without an embedding that is not the head, which no step reads."""
    assert SHAPES[name].num_parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert SHAPES[name].kv_bytes(1) == kv_bytes


DRAWN = [f"drawn-{seed}-{number}" for seed in (1, 2) for number in (1, 2, 3)]


@pytest.mark.parametrize("name", [*SHAPES, *DRAWN])
def test_matrices_of_a_shape_are_those_of_the_model_that_is_served(name: str, tmp_path: Path) -> None:
    shape = find_shape(name)
    write_shape(tmp_path, shape)
    config = read_model_config(read_checkpoint(tmp_path))
    placement = Placement(torch.device("meta"), torch.bfloat16)
    CausalLM(config.decoder, placement, max_model_len=16)
    matrices = {
        each.name: math.prod(each.shape)
        for each in placement.wanted
        if len(each.shape) > 1 and not each.name.endswith("bias")
    }
    stored = sum(matrices.values()) - (0 if shape.has_tied_head else shape.head_parameters)
    assert shape.num_parameters == stored
    windows = [each.window for each in config.decoder.attentions]
    assert windows.count(None) == (shape.num_layers if shape.window is None else shape.num_full_layers)


def test_a_seed_draws_models_as_large_as_8b_that_no_table_is_about() -> None:
    shapes = [find_shape(name) for name in DRAWN]
    assert shapes == [find_shape(name) for name in DRAWN]
    assert len({(each.hidden_size, each.intermediate_size) for each in shapes}) == len(DRAWN)
    assert {each.architecture for each in shapes} == {f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3")}
    measured = {
        (line.outputs[0], line.inputs[0])
        for line in packaged_lines(Card((9, 0), 132))
        if line.outputs[0] == line.outputs[1] and line.inputs[0] == line.inputs[1]
    }
    assert (6144, 4096) in measured
    for shape in shapes:
        assert shape.num_parameters == pytest.approx(7.6e9, rel=0.03)
        projections = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        assert not measured & {
            (projections, shape.hidden_size),
            (shape.hidden_size, shape.head_dim * shape.num_heads),
            (2 * shape.intermediate_size, shape.hidden_size),
            (shape.hidden_size, shape.intermediate_size),
        }


@pytest.mark.parametrize("name", ["9b", "drawn-1", "drawn-1-x", "drawn--1-1", "8b-zipf"])
def test_a_shape_that_is_not_there_is_an_error_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"no shape is called {name}"):
        find_shape(name)


def test_a_step_reads_the_experts_that_its_tokens_choose_and_what_windows_see() -> None:
    shape = SHAPES["30b-a3b"]
    of_experts = 48 * 3 * 2048 * 768 * 2
    assert shape.weight_bytes(1) == pytest.approx(2 * shape.num_parameters - (128 - 8) * of_experts)
    assert shape.weight_bytes(10_000) == pytest.approx(2 * shape.num_parameters)
    assert 2 * shape.token_parameters + 2 * shape.head_parameters == pytest.approx(shape.weight_bytes(1))
    gemma = SHAPES["gemma-4b"]
    assert gemma.kv_bytes(5000) == (29 * 1024 + 5 * 5000) * 4 * 256 * 4
    assert SHAPES["8b-fp8"].weight_bytes(1) == SHAPES["8b"].num_parameters + SHAPES["8b"].head_parameters
    layers, head = (SHAPES["8b"].num_parameters - SHAPES["8b"].head_parameters), 2 * SHAPES["8b"].head_parameters
    assert SHAPES["8b-awq"].weight_bytes(1) == pytest.approx(layers * (128 * 4 + 16 + 4) / 128 / 8 + head)
    routers, read = 2 * 48 * 2048 * 128, 4 + 20 / 128
    matrices = (shape.token_parameters - routers / 2) * read / 8
    assert SHAPES["30b-a3b-awq"].weight_bytes(1) == pytest.approx(matrices + routers + 2 * shape.head_parameters)
    assert SHAPES["8b-fp8-blocks"].weight_bytes(1) == pytest.approx(layers * (1 + 4 / 128**2) + head)
    oss = SHAPES["gpt-oss-20b"]
    rest = 2 * (oss.token_parameters - 4 * 24 * 3 * 2880 * 2880 + oss.head_parameters)
    assert oss.weight_bytes(1) == pytest.approx(rest + 4 * 24 * 3 * 2880 * 2880 * 4.25 / 8)


@pytest.mark.parametrize("name", ["8b-awq", "30b-a3b-awq", "8b-fp8-blocks", "gpt-oss-20b"])
def test_random_weights_of_a_quantized_shape_are_all_that_a_worker_reads(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    fields = dict(shape.fields)
    fields |= {"layer_types": fields["layer_types"][:2]} if "layer_types" in fields else {}
    fields |= {"moe_intermediate_size": 128} if "moe_intermediate_size" in fields else {}
    few = replace(shape, num_layers=2, hidden_size=256, intermediate_size=256, vocab_size=300, fields=fields)
    (tmp_path / "config.json").write_text(json.dumps(few.config), "utf-8")
    num_bytes = write(tmp_path)
    loaded = load_runner(RunnerOptions(str(tmp_path), device="cpu", num_blocks=20, max_model_len=32), time.monotonic_ns)
    assert num_bytes < 2 * few.num_parameters
    loaded.close()


@pytest.mark.parametrize(("count", "top_k"), [(128, 8), (32, 4), (64, 6), (4, 4)])
def test_shares_are_those_of_drawing_by_zipf_s_law_without_putting_back(count: int, top_k: int) -> None:
    chances = torch.arange(1, count + 1).double().reciprocal()
    drawn = torch.multinomial(chances.expand(20_000, count), top_k, generator=torch.Generator().manual_seed(1))
    of_each = torch.bincount(drawn.flatten(), minlength=count) / len(drawn)
    found = torch.tensor(shares(count, top_k, 1.0))
    assert float(found.sum()) == pytest.approx(top_k)
    assert float((found - of_each).abs().max()) < 0.06  # the popular ones a little less, as a time says how many ring
    assert float((found / of_each).log().abs().max()) < 0.15
    assert shares(count, top_k, 0.0) == pytest.approx([top_k / count] * count)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the experts of plain torch")
@pytest.mark.parametrize("name", ["30b-a3b-zipf", "30b-a3b-awq-zipf", "gpt-oss-20b-zipf", "v2-lite-zipf"])
def test_tokens_choose_experts_by_zipf_s_law_in_every_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = find_shape(name)
    assert shape.experts is not None
    assert shape.experts.read(32) < SHAPES[name.removesuffix("-zipf")].experts.read(32)  # type: ignore[union-attr]
    fields = dict(shape.fields)
    fields |= {"layer_types": fields["layer_types"][:4]} if "layer_types" in fields else {}
    fields |= {"moe_intermediate_size": 128} if "moe_intermediate_size" in fields else {}
    few = replace(shape, num_layers=4, hidden_size=512, vocab_size=2000, intermediate_size=128, fields=fields)
    write_shape(tmp_path, few)
    write(tmp_path, shape.experts.skew)
    chosen: list[Tensor] = []

    def choose(logits: Tensor, router: RouterLayer) -> tuple[Tensor, Tensor]:
        found = choose_experts(logits, router)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(torch_experts, "choose_experts", choose)
    draw = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(1900, (500,), generator=draw).tolist()} for _ in range(4)]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=512, max_num_batched_tokens=2048)
    chosen.clear()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    expected = torch.tensor(shares(shape.experts.count, shape.experts.top_k, 1.0))
    num_layers = few.num_layers - shape.experts.num_dense_layers
    for layer in range(num_layers - 1):  # in the last one the last tokens alone go on
        ids = torch.cat(chosen[layer::num_layers])
        of_each = (torch.bincount(ids.flatten(), minlength=len(expected)) / len(ids)).sort(descending=True).values
        # If all experts were as popular, this would be about 1.
        assert float((of_each - expected).abs().sum() / expected.sum()) < 0.3


def test_engines_have_the_context_that_rows_need() -> None:
    assert max_model_len([make_work("decode1"), make_work("nano")]) == 4096
    assert max_model_len([make_work("decode1"), make_work("long")]) == 16_384


def test_the_floor_of_one_sequence_is_its_weights_once_a_token() -> None:
    shape, work = SHAPES["8b"], make_work("decode1")
    floor = floor_s(shape, work, Ceilings("", bytes_per_s=4e12, flops=8e14))
    weights_s = 2 * shape.num_parameters / 4e12
    assert 255 * weights_s < floor < 1.02 * 256 * weights_s


def test_short_rows_have_the_rounds_that_were_asked_for_and_long_ones_one() -> None:
    rounds = {
        row: make_work(row, 5).num_rounds for row in ("decode1", "decode256", "prefill", "alone", "nano", "served")
    }
    assert rounds == {"decode1": 5, "decode256": 5, "prefill": 5, "alone": 5, "nano": 1, "served": 1}


def test_requests_that_wait_come_in_waves() -> None:
    work = make_work("served")
    half = type(work)("half", work.prompts[:1024], work.num_tokens[:1024], at_once=256)
    quarter = type(work)("quarter", work.prompts[:256], work.num_tokens[:256])
    ceilings = Ceilings("", 4e12, 8e14)
    assert floor_s(SHAPES["v32k"], half, ceilings) == pytest.approx(4 * floor_s(SHAPES["v32k"], quarter, ceilings))


def test_tokens_after_long_prompts_are_measured_without_them() -> None:
    prompts, deep = works_of("8b-fp8-kv", ["deep"], 2)
    assert (prompts.name, prompts.num_rounds, deep.name) == ("contexts", 2, "deep")
    assert prompts.prompts == deep.prompts
    assert deep.counted_tokens == 64 * 511
    rounds = {"contexts": [9.0, 8.5], "deep": [12.0, 11.5, 13.0], "long": [1.0]}
    assert deep.seconds(rounds) == 3.0
    assert prompts.seconds(rounds) == 8.5
    assert deep.seconds({"deep": [12.0]}) is None
    assert {work.name for work in works_of("8b-fp8-kv", (), 1)} > {"decode1", "contexts", "deep"}
    assert [work.name for work in works_of("8b", ["prefill", "deep"], 1)] == ["prefill"]


def test_a_step_reads_keys_and_values_of_8_bits() -> None:
    shape, ceilings = SHAPES["8b-fp8-kv"], Ceilings("", 4e12, 8e14)
    assert shape.kv_bytes(8000) == SHAPES["8b"].kv_bytes(4000)
    steps = sum(shape.weight_bytes(64) + 64 * shape.kv_bytes(context) for context in range(8001, 8512))
    [_, deep] = works_of("8b-fp8-kv", ["deep"], 1)
    assert floor_s(shape, deep, ceilings) == pytest.approx(steps / 4e12)


def test_texts_are_as_long_as_the_prompts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 10_001)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([f" w{number:04}" for number in range(10_001)])
    work = make_work("alone")
    texts = as_text(work, tokenizer)
    assert texts.texts is not None
    assert len(texts.texts) == len(work.prompts)
    assert all(len(ids) <= 128 for ids in texts.prompts)
    assert texts.inputs is texts.texts


def test_a_model_is_tuned_with_the_numbers_of_rows_that_are_asked_for() -> None:
    assert gpu.tune_command(Path("/m"), "fp8", "32,256")[3:] == (
        ["tune", "--model", "/m", "--quantization", "fp8", "--rows", "32,256"]
    )
    assert gpu.tune_command(Path("/m"), None, "")[3:] == ["tune", "--model", "/m"]


def test_what_is_no_list_of_rows_to_tune_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--models", "8b", "--tune", "32;256"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no list of numbers of rows" in capsys.readouterr().err
