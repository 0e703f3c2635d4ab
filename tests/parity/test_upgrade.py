"""While one checkpoint replaces another that differs in its values alone, each answer is of one of them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from checkpoints import VARIANTS, save_checkpoint
from in_memory import Pipeline, Running, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.plan import StepPlan
from penstock import LLM, SamplingParams
from penstock.client import Accepted, Delta, Generation
from worker_svc.core.interface import Limits, PendingStep, Runner
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 60
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WORKER = {"dtype": "float32", "num_blocks": 64, "max_model_len": 128, "num_threads": 1}


class Slow:
    """A runner that takes its time, so that something can happen meanwhile."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        time.sleep(0.05)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


def load_slowly(settings: WorkerSettings) -> LoadedWorker:
    loaded = load_worker(settings)
    return LoadedWorker(
        Slow(loaded.runner), loaded.profile, loaded.device, loaded.broadcast, loaded.close, loaded.model_digest
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints whose configurations, tensors' names and shapes are alike, and the first one once more."""
    found = []
    for name, seed in (("old", 1), ("new", 2), ("third", 3), ("old again", 1)):
        directory = tmp_path_factory.mktemp("models") / name
        save_checkpoint(directory, VARIANTS[0], seed)
        write_tokenizer(directory)
        found.append(directory)
    return found


@pytest.fixture(scope="module")
def answers(models: list[Path]) -> list[list[int]]:
    """The answers of the first two."""
    said = []
    for directory in models[:2]:
        llm = LLM(str(directory), dtype="float32", max_model_len=128)
        said.append(list(llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids))
    assert said[0] != said[1]
    return said


def join(pipeline: Pipeline, name: str, model: Path) -> Running:
    """One more worker of the pool, once it has registered."""
    settings = WorkerSettings(name=name, model=str(model), **WORKER)  # type: ignore[arg-type]
    worker = Running(WorkerService(settings, pipeline.bus, load_slowly))
    worker.thread.start()
    wait_until(lambda: worker.service._is_ready)
    return worker


def leave(worker: Running) -> None:
    worker.stop.drain()
    worker.thread.join(120)
    assert worker.error is None


def paired(pipeline: Pipeline, *names: str) -> None:
    wait_until(lambda: set(pipeline.scheduler.incarnations()) == set(names))


def begin(pipeline: Pipeline) -> tuple[Iterator[Accepted | Delta], Generation]:
    """A stream that has its first tokens."""
    stream = pipeline.client.generate(PROMPT, PARAMS)
    accepted = next(stream)
    assert isinstance(accepted, Accepted)
    generation = Generation.begin(accepted, PARAMS)
    for event in stream:
        assert isinstance(event, Delta)
        generation.extend(event)
        if len(generation.outputs[0].token_ids) > 2:
            break
    return stream, generation


def finish(stream: Iterator[Accepted | Delta], generation: Generation) -> Generation:
    for event in stream:
        assert isinstance(event, Delta)
        generation.extend(event)
    return generation


def test_a_stream_goes_on_with_the_model_that_it_began_on(models: list[Path], answers: list[list[int]]) -> None:
    old, new, third, again = models
    with Pipeline(old, worker=WORKER, load=load_slowly) as pipeline:
        stream, generation = begin(pipeline)
        newer = join(pipeline, "new", new)
        paired(pipeline, "worker", "new")
        leave(pipeline.running[1])
        paired(pipeline, "new")
        assert list(pipeline.client.complete(PROMPT, PARAMS).outputs[0].token_ids) == answers[1]
        # While the old stream waits for its model, a third one is not taken in.
        other = join(pipeline, "third", third)
        wait_until(lambda: not other.service.is_ready())
        assert "two other models" in other.service.status().note
        assert 2 < len(generation.outputs[0].token_ids) < NUM_TOKENS
        back = join(pipeline, "old again", again)
        assert list(finish(stream, generation).outputs[0].token_ids) == answers[0]
        # With the old model's last worker it is gone.
        leave(back)
        wait_until(other.service.is_ready)
        paired(pipeline, "new", "third")
        answer = pipeline.client.complete(PROMPT, PARAMS)
        fingerprints = {each.service.status().model_digest for each in (newer, other)}
        assert len(fingerprints) == 2
        assert answer.system_fingerprint in fingerprints
        assert generation.system_fingerprint == back.service.status().model_digest not in fingerprints
        leave(newer)
        leave(other)
        pipeline.running.pop(1)


def test_a_stream_whose_model_is_gone_for_good_ends_and_says_why(models: list[Path]) -> None:
    old, new, *_ = models
    with Pipeline(old, worker=WORKER, load=load_slowly, scheduler={"model_gone_s": 1.0}) as pipeline:
        stream, generation = begin(pipeline)
        leave(pipeline.running[1])
        paired(pipeline)
        time.sleep(1.5)  # without any worker it waits
        assert pipeline.scheduler.stats().num_requests == 1
        newer = join(pipeline, "new", new)
        with pytest.raises(PenstockError) as caught:
            finish(stream, generation)
        assert caught.value.code is ErrorCode.MODEL_REPLACED
        leave(newer)
        pipeline.running.pop(1)
