"""A scheduler with paged workers and a reader of its log, driven one operation at a time."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, fields

import numpy as np
from paged_worker import PagedWorker, kv_after, likeliest, reference

from contract.domain import chain
from contract.domain.finish import CancelReason, FinishReason, RequestError
from contract.domain.params import Sampling, Stopping
from contract.domain.plan import StepPlan, StepResult
from contract.domain.rows import TokenRows
from contract.domain.timeline import Start
from scheduler_svc.core.beams import Found
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.policy import Fair
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest

EOS = 0
STOPPING = [each.name for each in fields(Stopping)]


def expected_beams(request: QueuedRequest, max_tokens: int) -> list[list[int]]:
    """The outputs of an undisturbed search, computed beam by beam from the start."""
    search = request.search()
    assert search is not None
    prompt = request.prompt_token_ids.tolist()
    while True:
        for index, beam in enumerate(search.beams.running):
            ids, logprobs = likeliest(kv_after([*prompt, *beam.token_ids]), search.rules.num_candidates)
            search.found[index] = Found(np.array(ids, np.uint32), np.array(logprobs, np.float32))
        search.advance(search.choose())
        if (hypotheses := search.outcome(max_tokens)) is not None:
            return [each.token_ids.tolist() for each in hypotheses]


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_request(number: int, prompt: Collection[int], **said: object) -> QueuedRequest:
    """A greedy request that cannot end before its max_tokens unless it is told how."""
    stopping = {name: said.pop(name) for name in STOPPING if name in said}
    return QueuedRequest(
        request_id=request_id(number),
        prompt_token_ids=np.array(prompt, np.uint32),
        sampling=Sampling(),
        stopping=Stopping(**stopping),  # type: ignore[arg-type]
        seed=number,
        arrival_ns=number,
        **said,  # type: ignore[arg-type]
    )


@dataclass
class Written:
    """What the log holds of one sequence."""

    tokens: list[int] = field(default_factory=list)
    chain: int = chain.CHAIN_START
    finish: FinishReason = FinishReason.UNSPECIFIED
    error: RequestError | None = None
    cached_tokens: list[int] = field(default_factory=list)
    model_digest: bytes = b""  # of the worker that computed the tokens


class Scheduling:
    def __init__(self, limits: dict[str, WorkerLimits], **config: object) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**config))  # type: ignore[arg-type]
        self.limits = limits
        self.paged: dict[str, PagedWorker] = {}
        self.in_flight: dict[str, deque[StepPlan]] = {}
        self.applied: dict[str, StepResult] = {}
        self.written: dict[tuple[bytes, int], Written] = {}
        self.requests: dict[bytes, QueuedRequest] = {}
        self.stopped: set[tuple[bytes, int]] = set()  # ended by the detokenizer: no finish row comes
        self.now_ns = 1
        self.starts: list[tuple[int, int, int, Start]] = []  # number, sequence, position and start, as the log tells
        for worker_id in limits:
            self.add_worker(worker_id)

    def add_worker(self, worker_id: str, model_digest: bytes = b"") -> None:
        self.paged[worker_id] = PagedWorker(self.limits[worker_id], model_digest)
        self.in_flight[worker_id] = deque()
        self.applied.pop(worker_id, None)
        self._write(self.scheduler.add_worker(worker_id, self.limits[worker_id], model_digest))

    def remove_worker(self, worker_id: str) -> None:
        self.scheduler.remove_worker(worker_id)
        del self.paged[worker_id], self.in_flight[worker_id]
        self.scheduler.check_integrity()

    def lose_worker(self, worker_id: str) -> list[int]:
        """The worker dies; the numbers of the requests that got a strike."""
        struck, rows = self.scheduler.strike(worker_id)
        self._write(rows)
        self.remove_worker(worker_id)
        return [int.from_bytes(request.request_id, "big") for request in struck]

    def add(self, request: QueuedRequest) -> None:
        self.requests.setdefault(request.request_id, request)
        for index in range(request.n + (request.beams is not None)):
            written = self.written.setdefault((request.request_id, index), Written())
            written.model_digest = request.model_digest or b""
            if index == request.n:
                written.tokens = request.search_words.tolist()
                written.chain = chain.extend(chain.CHAIN_START, written.tokens)
            elif index < len(request.output_token_ids):
                written.tokens = request.output_token_ids[index].tolist()
                written.chain = chain.extend(chain.CHAIN_START, written.tokens)
        self._write(self.scheduler.add(request, self.now_ns))

    def cancel(self, number: int, reason: CancelReason = CancelReason.CLIENT, sequence: int | None = None) -> None:
        if reason is CancelReason.STOP:
            known = self.requests.get(request_id(number))
            indexes = range(known.n if known else 8) if sequence is None else (sequence,)
            self.stopped |= {(request_id(number), index) for index in indexes}
        self._write(self.scheduler.cancel(request_id(number), reason, self.now_ns, sequence))

    def abandon(self, model_digest: bytes) -> None:
        self._write(self.scheduler.abandon(model_digest, 600.0))

    def expire(self, now_ns: int) -> None:
        self.now_ns = max(self.now_ns, now_ns)
        self._write(self.scheduler.expire(self.now_ns))

    def schedule(self, worker_id: str = "a") -> StepPlan | None:
        plan = self.scheduler.schedule(worker_id, self.now_ns)
        self.scheduler.check_integrity()
        if plan is not None:
            self.in_flight[worker_id].append(plan)
            assert int(plan.num_tokens.sum()) <= self.scheduler.workers[worker_id].max_num_batched_tokens
            assert len(self.in_flight[worker_id]) <= self.scheduler.config.plans_in_flight
        return plan

    def complete(self, worker_id: str = "a", silent: Collection[int] = ()) -> StepResult | None:
        """Let the worker carry out its oldest plan and apply the result."""
        if not self.in_flight[worker_id]:
            return None
        result = self.paged[worker_id].execute(self.in_flight[worker_id].popleft(), silent)
        self._write(self.scheduler.apply(worker_id, result, self.now_ns))
        self.applied[worker_id] = result
        return result

    def redeliver(self, worker_id: str) -> None:
        if worker_id in self.applied:
            assert len(self.scheduler.apply(worker_id, self.applied[worker_id], self.now_ns)) == 0

    def step(self, worker_id: str = "a") -> StepPlan | None:
        """Fill the window, then complete the oldest plan; the first plan made."""
        plans = []
        while plan := self.schedule(worker_id):
            plans.append(plan)
        self.complete(worker_id)
        return plans[0] if plans else None

    def run(self, max_steps: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            for worker_id in list(self.paged):
                self.step(worker_id)
            if not any(self.in_flight.values()) and not self.scheduler.requests:
                return
        raise AssertionError(f"{len(self.scheduler.requests)} requests do not end")

    def output(self, number: int, sequence: int = 0) -> list[int]:
        return self.written[request_id(number), sequence].tokens

    def finish(self, number: int, sequence: int = 0) -> FinishReason:
        return self.written[request_id(number), sequence].finish

    def expected(self, request: QueuedRequest, sequence: int) -> tuple[list[int], FinishReason]:
        """What the sequence gives when nothing disturbs it, on the roomiest worker."""
        if request.pooling is not None:
            return [], FinishReason.POOLED
        capacity = max(limits.capacity for limits in self.limits.values())
        stopping = request.stopping
        prompt = request.prompt_token_ids.tolist()
        limit = capacity if stopping.max_tokens is None else min(capacity, len(prompt) + stopping.max_tokens)
        if request.beams is not None:
            hypothesis = expected_beams(request, limit - len(prompt))[sequence]
            is_stop = hypothesis[-1] in request.all_stop_ids
            return hypothesis, FinishReason.STOP if is_stop else FinishReason.LENGTH
        stops = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else request.eos_token_ids)}
        seed = chain.sequence_seed(request.seed, sequence)
        written = self.written.get((request.request_id, sequence), Written())
        output, is_stop = reference(prompt, seed, stops, stopping.min_tokens, limit, written.model_digest)
        return output, FinishReason.STOP if is_stop else FinishReason.LENGTH

    def assert_nothing_is_left(self) -> None:
        """No sequence, block, slot or queue entry; every sequence ended once, with the tokens of an undisturbed one."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not len(scheduler.waiting)
        assert not len(scheduler.requests._deadlines)
        if isinstance(scheduler.policy, Fair):
            assert not scheduler.policy._queue._classes
        for worker in scheduler.workers.values():
            assert worker.blocks.num_free == worker.limits.num_blocks
            assert worker.num_running == 0
        for (identifier, index), written in self.written.items():
            request = self.requests[identifier]
            if index == request.n:  # the log of a search, which has no end
                continue
            tokens, finish = self.expected(request, index)
            if (identifier, index) in self.stopped or written.finish in (FinishReason.CANCELLED, FinishReason.ERROR):
                assert tokens[: len(written.tokens)] == written.tokens
            elif index not in request.ended_sequences:
                assert (written.tokens, written.finish) == (tokens, finish)

    def _all_written(self, identifier: bytes) -> list[Written]:
        request = self.requests[identifier]
        return [self.written[identifier, index] for index in range(request.n + (request.beams is not None))]

    def _write(self, rows: TokenRows) -> None:
        """Read rows as a detokenizer does, but refuse what it would only ignore."""
        starts = np.cumsum(rows.counts) - rows.counts
        for row, identifier in enumerate(rows.request_ids):
            written = self.written[identifier, int(rows.sequences[row])]
            assert written.finish == FinishReason.UNSPECIFIED, "a row behind the end"
            assert rows.positions[row] == len(written.tokens)
            if start := rows.starts.get(row):
                place = int(rows.sequences[row]), len(written.tokens)
                self.starts.append((int.from_bytes(identifier, "big"), *place, start))
            assert rows.chains[row] == written.chain
            tokens = rows.token_ids[starts[row] : starts[row] + rows.counts[row]].tolist()
            if tokens:
                models = {each.model_digest for each in self._all_written(identifier) if each.tokens}
                models.add(rows.model_digest)
                assert len(models) == 1, "two models generate one request"
                written.model_digest = rows.model_digest
            written.tokens += tokens
            written.chain = chain.extend(written.chain, tokens)
            written.finish = FinishReason(rows.finishes[row])
            written.error = rows.errors.get(row)
            written.cached_tokens.append(int(rows.cached_tokens[row]))
            assert (written.finish == FinishReason.ERROR) == (written.error is not None)
            assert tokens or written.finish
        assert int(rows.counts.sum()) == len(rows.token_ids)
        self.scheduler.check_integrity()
