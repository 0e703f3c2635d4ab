"""Real processes on Valkey against transformers: what clients at once get is what transformers gives one by one."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cases import BLOCK_SIZE, FEW_BLOCKS, MANY_BLOCKS, Case
from reference import NUM_PROMPTS, PARAMS, Reference, assert_equal, make_reference
from served import Served

from contract.domain.params import SamplingParams
from contract.v1 import scheduler_pb2, scheduler_pb2_grpc
from penstock.client import Client, Generation

CASES = [
    ("llama_llama3_rope_tied", Case(2, 16, True, FEW_BLOCKS)),
    ("llama_biases", Case(1, 512, False, MANY_BLOCKS)),
    ("qwen2_tied", Case(4, 512, True, FEW_BLOCKS)),
    ("qwen3_biases", Case(4, 16, False, MANY_BLOCKS)),
]
NUM_BALLAST = 8
BALLAST = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@contextmanager
def serve(directory: Path, reference: Reference, case: Case) -> Iterator[Served]:
    flags = (
        f"--model={reference.directory}",
        "--dtype=float32",
        "--num-threads=1",
        f"--plans-in-flight={case.window}",
        "--short-step-us=0",
        f"--max-num-batched-tokens={case.budget}",
        "--enable-prefix-caching" if case.enable_prefix_caching else "--no-enable-prefix-caching",
        f"--block-size={BLOCK_SIZE}",
        f"--num-blocks={case.num_blocks}",
        f"--max-model-len={FEW_BLOCKS * BLOCK_SIZE}",
        f"--max-num-seqs={NUM_PROMPTS}",
    )
    with Served(directory, *flags) as served:
        yield served.wait_ready()


class Watch:
    """Asks the scheduler, again and again, how many plans are in flight."""

    def __init__(self, client: Client) -> None:
        (scheduler,) = (each for each in client.pipeline().sessions if each.kind == "scheduler")
        self._channel = grpc.insecure_channel(scheduler.address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_in_flight = 0

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._channel.close()

    def status(self) -> scheduler_pb2.SchedulerStatus:
        return self._stub.GetStatus(scheduler_pb2.GetSchedulerStatusCall())

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            for worker in self.status().workers:
                self.most_in_flight = max(self.most_in_flight, worker.plans_in_flight)


@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_clients_of_real_processes_get_what_transformers_says(name: str, case: Case, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    reference = make_reference(name, tmp_path / "model")
    prompts = [answer.prompt for answer in reference.answers]
    with (
        serve(tmp_path, reference, case) as served,
        served.client() as client,
        Watch(client) as watch,
        ThreadPoolExecutor(NUM_PROMPTS + NUM_BALLAST) as pool,
    ):
        # These grow until they need more blocks than there are few, whenever the others come.
        ballast = [pool.submit(client.complete, [3 + index], BALLAST) for index in range(NUM_BALLAST)]
        generations: list[Generation] = list(pool.map(lambda prompt: client.complete(prompt, PARAMS), prompts))
        assert {len(each.result().outputs[0].token_ids) for each in ballast} == {BALLAST.max_tokens}
        status = watch.status()
    for answer, generation in zip(reference.answers, generations, strict=True):
        assert_equal(answer, generation.outputs[0].token_ids, generation.outputs[0].logprobs or [])
    num_cached = sum(generation.usage.num_cached_tokens for generation in generations if generation.usage)
    assert watch.most_in_flight == case.window
    assert (status.preemptions > 0) == (case.num_blocks == FEW_BLOCKS)
    assert (num_cached > 0) == case.enable_prefix_caching
    # No step of 16 tokens holds a prompt of 300: it was computed in chunks.
    assert case.budget == 512 or max(map(len, prompts)) > case.budget
