"""While one checkpoint replaces another that differs in its values alone, each answer is of one of them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_tokenizer
from checkpoints import VARIANTS, save_checkpoint
from in_memory import Pipeline, Running, wait_until
from memory_bus import MemoryBus

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.plan import StepPlan
from penstock import LLM, SamplingParams
from penstock.client import Accepted, Delta, Generation
from servicekit.bus.calls import Call, Renew
from worker_svc.core.interface import Limits, PendingStep, Runner
from worker_svc.loading import LoadedWorker, load_worker
from worker_svc.service import WorkerService
from worker_svc.settings import WorkerSettings

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 60
NUM_FIRST_STEPS = 5
LIMIT_S = 300
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
WORKER = {"dtype": "float32", "num_blocks": 64, "max_model_len": 128, "num_threads": 1}


class TellingBus(MemoryBus):
    """Knows on which models requests have begun, as a scheduler has told last: it does so now and then."""

    models = b""

    def apply(self, calls: Sequence[Call[Any]], wake: Callable[[], None]) -> list[Any]:
        answers = super().apply(calls, wake)
        told = [each.models for each in calls if isinstance(each, Renew) and each.models is not None]
        self.models = told[-1] if told else self.models
        return answers


class Held:
    """A runner that carries out its first steps, and the others once it may: what they are of goes on meanwhile."""

    def __init__(self, runner: Runner, may_go_on: threading.Event) -> None:
        self._runner = runner
        self._may_go_on = may_go_on

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.step > NUM_FIRST_STEPS:
            assert self._may_go_on.wait(LIMIT_S)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


def load_held(may_go_on: threading.Event, settings: WorkerSettings) -> LoadedWorker:
    loaded = load_worker(settings)
    return replace(loaded, runner=Held(loaded.runner, may_go_on))


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
    worker = Running(WorkerService(settings, pipeline.bus))
    worker.thread.start()
    wait_until(lambda: worker.service._is_ready)
    return worker


def leave(worker: Running, may_go_on: threading.Event | None = None) -> None:
    """It ends, after the steps that it has read; one that is held may go on with them."""
    worker.stop.drain()
    if may_go_on is not None:
        may_go_on.set()
    worker.thread.join(LIMIT_S)
    assert not worker.thread.is_alive()
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
    bus, may_go_on = TellingBus(), threading.Event()
    with Pipeline(old, bus=bus, worker=WORKER, load=partial(load_held, may_go_on)) as pipeline:
        stream, generation = begin(pipeline)
        newer = join(pipeline, "new", new)
        paired(pipeline, "worker", "new")
        leave(pipeline.running[1], may_go_on)
        paired(pipeline, "new")
        assert list(pipeline.client.complete(PROMPT, PARAMS).outputs[0].token_ids) == answers[1]
        # While the old stream waits for its model, a third one is not taken in.
        wait_until(lambda: bool(bus.models))
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
    may_go_on = threading.Event()
    load = partial(load_held, may_go_on)
    with Pipeline(old, worker=WORKER, load=load, scheduler={"model_gone_s": 1.0}) as pipeline:
        stream, generation = begin(pipeline)
        leave(pipeline.running[1], may_go_on)
        paired(pipeline)
        time.sleep(1.5)  # without any worker it waits
        assert pipeline.scheduler.stats().num_requests == 1
        newer = join(pipeline, "new", new)
        with pytest.raises(PenstockError) as caught:
            finish(stream, generation)
        assert caught.value.code is ErrorCode.MODEL_REPLACED
        leave(newer)
        pipeline.running.pop(1)
