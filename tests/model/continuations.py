"""The real core of schedulers as a function: how a request goes on after what it has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from clients import Asked
from samplers import Kind

from contract.domain.finish import CancelReason, FinishReason
from contract.domain.kv_kinds import KVKind, Reach
from contract.domain.model_kind import ModelKind
from contract.domain.plan import Logprobs, StepPlan, StepResult
from contract.domain.rows import TokenRows
from contract.domain.timeline import Computed
from scheduler_svc.core import rows as core_rows
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.history import History
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest, Status
from scheduler_svc.wire import decode_request, encode_rows
from servicekit.bus.calls import (
    StoredRequest,
)

# Layers of three kinds, blocks of the fewest tokens: nearly every plan appends blocks, gives some up, or both. Further
# layers keep a state: beams name their parents' slots.
KINDS = KVKind(2), KVKind(1, Reach(2)), KVKind(1, Reach(chunk=2))
LIMITS = WorkerLimits(
    num_blocks=64,
    block_size=1,
    max_num_seqs=4,
    max_model_len=40,
    max_num_batched_tokens=40,
    kinds=KINDS,
    has_state=True,
)
ENCODER = WorkerLimits(0, 1, 4, 40, 40, model_kind=ModelKind.ENCODER)
SHARD = 0
MODELS = (b"old-----", b"new-----")  # of workers, in a space of an upgrade


class Sample(NamedTuple):
    """One sample as a scheduler has it."""

    token_ids: tuple[int, ...] = ()
    has_ended: bool = False
    model_digest: bytes = b""  # of the model that generated the tokens


Samples = tuple[Sample, ...]  # and after them, where there is one, the search: words, and never what goes on
BeamTokens = Callable[[tuple[int, ...]], list[int]]  # the likeliest tokens after those of a beam


class Continued(NamedTuple):
    """A request after a step of the core: the rows to log, and its samples."""

    rows: bytes  # a TokenBatch; empty: none
    samples: Samples

    @property
    def is_live(self) -> bool:
        return not all(sample.has_ended for sample in self.samples)


class Continuations:
    """The scheduler's core as a function: it is made anew for each question, with what a request has so far."""

    def __init__(self, asked: tuple[Asked, ...], limits: WorkerLimits = LIMITS) -> None:
        self._asked = {each.request_id: each for each in asked}
        self._limits = limits  # of workers
        self._known: dict[object, Continued] = {}

    def add(self, sid: bytes, request_id: bytes, samples: Samples) -> Continued:
        """A request is queued."""
        return self._look_up((sid, request_id, samples, "add"), lambda: self._add(sid, request_id, samples))

    def advance(
        self,
        sid: bytes,
        request_id: bytes,
        samples: Samples,
        sequence: int,
        token_id: int | None,
        model_digest: bytes = MODELS[0],
    ) -> Continued:
        """One sample gets its next token of a worker with this model; None: its prompt is pooled there."""
        key = (sid, request_id, samples, sequence, token_id, model_digest)
        make = partial(self._advance, sid, request_id, samples, sequence, token_id, model_digest)
        return self._look_up(key, make)

    def search(self, sid: bytes, request_id: bytes, samples: Samples, kind: Kind, tokens: "BeamTokens") -> Continued:
        """All beams of a request get their next tokens, and one choice is made of them."""
        key = (sid, request_id, samples, "search", kind)
        return self._look_up(key, lambda: self._search(sid, request_id, samples, tokens))

    def abandon(self, sid: bytes, request_id: bytes, samples: Samples) -> Continued:
        """No worker has a request's model any more."""
        return self._look_up((sid, request_id, samples, "abandon"), lambda: self._abandon(sid, request_id, samples))

    def cancel(self, sid: bytes, request_id: bytes, samples: Samples, reason: int, sequence: int) -> Continued:
        """A request or one of its samples is cancelled."""
        key = (sid, request_id, samples, "cancel", reason, sequence)
        return self._look_up(key, lambda: self._cancel(sid, request_id, samples, reason, sequence))

    def finish_of(self, request_id: bytes) -> Callable[[Sequence[int]], FinishReason]:
        """The end that output tokens of a request have brought."""
        return partial(core_rows.finish_of, self._request(request_id))

    def _look_up(self, key: object, make: Callable[[], Continued]) -> Continued:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known

    def _request(self, request_id: bytes) -> QueuedRequest:
        asked = self._asked[request_id]
        return decode_request(request_id, asked.header, asked.body, asked.meta, asked.token_ids)

    def _core(self, request_id: bytes, samples: Samples) -> tuple[Scheduler, TokenRows]:
        num = self._asked[request_id].num_samples
        request = replace(
            self._request(request_id),
            output_token_ids=tuple(np.array(sample.token_ids, np.uint32) for sample in samples[:num]),
            ended_sequences=frozenset(index for index, sample in enumerate(samples[:num]) if sample.has_ended),
            search_words=np.array([word for sample in samples[num:] for word in sample.token_ids], np.uint32),
            model_digest=model_of(samples) or None,
        )
        scheduler = Scheduler(SchedulerConfig(plans_in_flight=1, enable_prefix_caching=False))
        return scheduler, scheduler.add(request, 0)

    def _add(self, sid: bytes, request_id: bytes, samples: Samples) -> Continued:
        scheduler, rows = self._core(request_id, samples)
        return _continued(sid, rows, scheduler, request_id, samples)

    def _abandon(self, sid: bytes, request_id: bytes, samples: Samples) -> Continued:
        scheduler, _ = self._core(request_id, samples)
        rows = scheduler.abandon(model_of(samples), 600.0)
        return _continued(sid, rows, scheduler, request_id, samples)

    def _advance(
        self, sid: bytes, request_id: bytes, samples: Samples, sequence: int, token_id: int | None, model_digest: bytes
    ) -> Continued:
        alone = tuple(s if i == sequence else s._replace(has_ended=True) for i, s in enumerate(samples))
        # Whether this worker may go on with it was decided before.
        unpinned = tuple(s._replace(model_digest=b"") for s in alone)
        scheduler, _ = self._core(request_id, unpinned)
        scheduler.add_worker("worker", self._limits, model_digest)
        plan = scheduler.schedule("worker", 0)
        assert plan is not None
        scheduler.check_integrity()
        tokens = np.array([] if token_id is None else [token_id], np.uint32)
        counts = np.array([len(tokens)], np.uint32)
        rows = scheduler.apply("worker", StepResult(plan.step, plan.slots, counts, tokens), 0)
        scheduler.check_integrity()
        ended = bool(rows.finishes[0])
        sample = Sample((*samples[sequence].token_ids, *rows.token_ids.tolist()), ended, model_digest)
        return Continued(encode_rows(rows, sid, Computed()), with_sample(samples, sequence, sample))

    def _search(self, sid: bytes, request_id: bytes, samples: Samples, tokens: "BeamTokens") -> Continued:
        scheduler, _ = self._core(request_id, tuple(s._replace(model_digest=b"") for s in samples))
        scheduler.add_worker("worker", LIMITS, MODELS[0])
        rows = core_rows.NO_ROWS
        while not len(rows):
            plan = scheduler.schedule("worker", 0)
            assert plan is not None
            rows = scheduler.apply("worker", _found(plan, tokens), 0)
            scheduler.check_integrity()
        after = list(samples)
        words_of_rows = np.split(rows.token_ids, np.cumsum(rows.counts)[:-1])
        for row, words in zip(rows.sequences.tolist(), words_of_rows, strict=True):
            after[row] = Sample((*after[row].token_ids, *words.tolist()), True, MODELS[0])
        return Continued(encode_rows(rows, sid, Computed()), tuple(after))

    def _cancel(self, sid: bytes, request_id: bytes, samples: Samples, reason: int, sequence: int) -> Continued:
        scheduler, _ = self._core(request_id, samples)
        rows = scheduler.cancel(request_id, CancelReason(reason), 0, sequence if sequence >= 0 else None)
        return _continued(sid, rows, scheduler, request_id, samples)


def _found(plan: StepPlan, tokens: "BeamTokens") -> StepResult:
    """Every beam of a plan finds some tokens, each less likely than the one before."""
    tops = [tokens(tuple(each.token_ids[each.num_prompt_tokens :].tolist())) for each in plan.admissions]
    slots = np.array([each.slot for each in plan.admissions], np.uint32)
    ones, counts = np.ones(len(tops), np.uint32), np.array([len(top) for top in tops], np.uint32)
    token_ids = np.array([token for top in tops for token in top], np.uint32)
    logprobs = np.array([-1.0 - rank for top in tops for rank in range(len(top))], np.float32)
    told = Logprobs(np.full(len(tops), np.nan, np.float32), ones * 0, counts, token_ids, logprobs)
    return StepResult(plan.step, slots, ones, token_ids[np.cumsum(counts) - counts], told)


def _continued(sid: bytes, rows: TokenRows, scheduler: Scheduler, request_id: bytes, samples: Samples) -> Continued:
    held = scheduler.requests.get(request_id)
    live = {s.index for s in held.sequences if s.status is not Status.ENDED} if held else set()
    after = tuple(sample._replace(has_ended=index not in live) for index, sample in enumerate(samples))
    return Continued(encode_rows(rows, sid, Computed()) if len(rows) else b"", after)


def model_of(samples: Samples) -> bytes:
    """The model that a request began on; empty: none yet."""
    return next((sample.model_digest for sample in samples if sample.model_digest), b"")


def with_sample(samples: Samples, index: int, sample: Sample) -> Samples:
    """All samples, one of them in another state."""
    return (*samples[:index], sample, *samples[index + 1 :])


def logged_model(stored: StoredRequest, histories: Sequence[History]) -> bytes:
    return next((history.model_digest for history in histories if history.model_digest), stored.model_digest)
