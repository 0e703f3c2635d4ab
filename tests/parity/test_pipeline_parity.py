"""All five services on a bus in memory: 32 clients at once get what transformers gives one by one."""

import dataclasses
import threading
from collections.abc import Callable

import pytest
from cases import (
    BLOCK_SIZE,
    CHECKPOINTS,
    FEW_BLOCKS,
    MIN_SAVED_TOKENS,
    Case,
    assert_switched_on,
    num_blocks_of,
    pairwise,
)
from in_memory import Pipeline, wait_until
from recorder import Recorder
from reference import NUM_PROMPTS, Reference, assert_equal, assert_prompt_equal, params_of

from penstock.client import Accepted, Generation
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.settings import WorkerSettings


def plans_in_flight(pipeline: Pipeline) -> int:
    return sum(worker.num_plans_in_flight for worker in pipeline.scheduler.stats().workers.values())


@pytest.mark.parametrize(("name", "case"), pairwise(CHECKPOINTS), ids=str)
def test_clients_of_the_pipeline_get_what_transformers_says(
    reference: Callable[[str], Reference], name: str, case: Case
) -> None:
    expected = reference(name)
    gate = threading.Event()
    recorders: list[Recorder] = []

    def load_recorded(settings: WorkerSettings) -> LoadedWorker:
        loaded = load_worker(settings)
        recorders.append(Recorder(loaded.runner, gate))
        return dataclasses.replace(loaded, runner=recorders[0])

    pipeline = Pipeline(
        expected.directory,
        # All services share this process with other work: none is to be taken for dead.
        every={"session_ttl_s": 60.0},
        scheduler={
            "plans_in_flight": case.window,
            "short_step_us": 0,
            "max_num_batched_tokens": case.budget,
            "enable_prefix_caching": case.enable_prefix_caching,
            "min_saved_tokens": MIN_SAVED_TOKENS,
        },
        worker={
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            # By its own budget, which is not the scheduler's, the worker may take all of a sequence in a step.
            "num_blocks": num_blocks_of(case, expected.directory, FEW_BLOCKS * BLOCK_SIZE),
            "max_model_len": FEW_BLOCKS * BLOCK_SIZE,
            "max_num_seqs": NUM_PROMPTS,
            "num_threads": 1,
        },
        load=load_recorded,
    )
    with pipeline:
        # One after the other, so that they are served in this order; the worker begins when all are there.
        params = [params_of(index) for index in range(NUM_PROMPTS)]
        prompts = [answer.prompt for answer in expected.answers]
        streams = [pipeline.client.generate(*each) for each in zip(prompts, params, strict=True)]
        accepted = [next(stream) for stream in streams]
        wait_until(lambda: pipeline.scheduler.stats().num_requests == NUM_PROMPTS)
        # As many plans as the window allows were sent, and the first is not carried out.
        wait_until(lambda: plans_in_flight(pipeline) == case.window)
        gate.set()
        generations = []
        for stream, first, asked in zip(streams, accepted, params, strict=True):
            assert isinstance(first, Accepted)
            generations.append(Generation.begin(first, asked))
            for event in stream:
                assert not isinstance(event, Accepted)
                generations[-1].extend(event)
        counters = pipeline.scheduler.stats().counters
    for index, (answer, generation) in enumerate(zip(expected.answers, generations, strict=True)):
        assert_prompt_equal(index, answer, generation.prompt_logprobs)
        assert_equal(answer, generation.outputs[0].token_ids, generation.outputs[0].logprobs or [])
    assert_switched_on(case, recorders[0], counters)
