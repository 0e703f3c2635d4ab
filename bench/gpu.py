"""The engine in one process on a GPU, against what the card can do: decode, prefill and a mixed load.

Models have the shapes of Qwen3-0.6B and Qwen3-8B and random weights, made on the device; nothing is downloaded. Prompts
are token ids, outputs are as long as asked for. Ceilings are measured in the same run. A row's floor is the time that
the card needs at those ceilings with nothing overlapped: weights and KV read once a step, and the matrix products.

    decode B    B sequences at once, 128 tokens in, 256 out
    prefill     32 prompts of 2,048 tokens, one token out
    nano        256 requests, in and out uniform in 100-1024, temperature 0.6, seed 0 (nano-vllm's bench)

    python -m bench.gpu [--models 0.6b,8b] [--rows decode1,decode32,decode256,prefill,nano] [--profile]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.rig.machine import describe_machine
from bench.rig.qwen3 import write_qwen3
from bench.rig.step_profile import profile_decode
from penstock import LLM, SamplingParams

ROWS = ("decode1", "decode32", "decode256", "prefill", "nano")
CHUNK = {"0.6b": 8192, "8b": 4096}
PREFILL_TOKENS = 2048
KV_BYTES = {"0.6b": 28 * 8 * 128 * 4, "8b": 36 * 8 * 128 * 4}  # of one token
PARAMETERS = {"0.6b": 0.596e9, "8b": 7.57e9}  # read in every step: all layers and the head
HEAD_PARAMETERS = {"0.6b": 0.156e9, "8b": 0.622e9}  # used only for tokens that are sampled


@dataclass(frozen=True)
class Ceilings:
    """What the card does at its best."""

    bytes_per_s: float  # copied, bytes read and written
    flops: float  # bf16 product of 8192 x 8192 matrices


@dataclass(frozen=True)
class Work:
    """What one row generates."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    counts_prompts: bool = False  # tokens per second are prompt tokens

    @property
    def num_tokens(self) -> int:
        if self.counts_prompts:
            return sum(map(len, self.prompts))
        return sum(each.max_tokens or 0 for each in self.params)


def measure_ceilings() -> Ceilings:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: left @ right)
    return Ceilings(2 * source.nbytes / copy_s, 2 * 8192**3 / product_s)


def median_s(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def make_work(row: str) -> Work:
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randint(0, 10000) for _ in range(length)]

    def params(length: int, temperature: float = 0.0) -> SamplingParams:
        return SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)

    if row == "prefill":
        return Work(row, [prompt(PREFILL_TOKENS) for _ in range(32)], [params(1)] * 32, counts_prompts=True)
    if row == "nano":
        prompts = [prompt(draw.randint(100, 1024)) for _ in range(256)]
        return Work(row, prompts, [params(draw.randint(100, 1024), 0.6) for _ in range(256)])
    batch = int(row.removeprefix("decode"))
    return Work(row, [prompt(128) for _ in range(batch)], [params(256)] * batch)


def floor_s(model: str, work: Work, ceilings: Ceilings) -> float:
    """Seconds for the products of all tokens, or for the bytes of all steps where those take longer, step by step."""
    layer_flops = 2 * (PARAMETERS[model] - HEAD_PARAMETERS[model])
    prompt_tokens = sum(map(len, work.prompts))
    seconds = prompt_tokens * layer_flops / ceilings.flops
    lengths = [each.max_tokens or 0 for each in work.params]
    for step in range(1, max(lengths)):
        running = [len(ids) + step for ids, length in zip(work.prompts, lengths, strict=True) if length > step]
        moved = 2 * PARAMETERS[model] + KV_BYTES[model] * sum(running)
        flops = 2 * PARAMETERS[model] * len(running)
        seconds += max(moved / ceilings.bytes_per_s, flops / ceilings.flops)
    return seconds


def run(llm: LLM, work: Work) -> float:
    prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, work.params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output, params in zip(outputs, work.params, strict=True):
        assert len(output.outputs[0].token_ids) == params.max_tokens
    return seconds


def measure(model: str, rows: list[str], ceilings: Ceilings, rounds: int, *, with_profile: bool) -> list[str]:
    lines = []
    with TemporaryDirectory() as folder:
        write_qwen3(Path(folder), model)
        begin = time.perf_counter()
        llm = LLM(
            folder,
            load_format="dummy",
            max_model_len=4096,
            gpu_memory_utilization=0.85,
            max_num_batched_tokens=CHUNK[model],
            enable_prefix_caching=False,
        )
        ready_s = time.perf_counter() - begin
        llm.generate([{"prompt_token_ids": [1] * 10}], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        first_s = time.perf_counter() - begin
    lines.append(f"{model:5} start     ready {ready_s:.1f} s, first tokens {first_s:.1f} s")
    for row in rows:
        work = make_work(row)
        seconds = min(run(llm, work) for _ in range(rounds))
        rate, floor = work.num_tokens / seconds, work.num_tokens / floor_s(model, work, ceilings)
        lines.append(
            f"{model:5} {row:9} {seconds:8.3f} s {rate:10,.0f} tok/s  floor {floor:10,.0f}  {rate / floor:.2f}"
        )
        print(lines[-1], flush=True)
    if with_profile:
        lines += [f"{model:5} {line}" for batch in (1, 32, 256) for line in profile_decode(llm, batch)]
    llm.llm_engine.close()
    del llm
    torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row, of which the fastest counts")
    parser.add_argument("--profile", action="store_true", help="where the time of decode steps goes")
    arguments = parser.parse_args()
    ceilings = measure_ceilings()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.flops / 1e12:.0f} TFLOP/s"
    ]
    for model in arguments.models.split(","):
        lines += measure(model, arguments.rows.split(","), ceilings, arguments.rounds, with_profile=arguments.profile)
    print(describe_machine())
    print("\n".join(lines))


if __name__ == "__main__":
    main()
