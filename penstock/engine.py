"""The pipeline's cores in one process, without a bus: tokenize, plan, execute ahead, detokenize."""

import time
from collections import deque
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from contract.domain import chain
from contract.domain.errors import ErrorCode, PenstockError, invalid
from contract.domain.finish import CancelReason
from contract.domain.model_kind import wrong_kind
from contract.domain.params import SamplingParams
from contract.domain.plan import StepPlan
from contract.domain.pooling import Pooling, is_done_by
from contract.domain.request import Header, Prompt, Request
from contract.domain.rows import TokenRows
from detokenizer_svc.core.detokenizer import Detokenizer
from detokenizer_svc.core.request import OpenRequest
from penstock.outputs import RequestOutput, new_samples, prompt_entries
from penstock.prompts import PromptLike, parse_prompt
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import QueuedRequest
from scheduler_svc.core.stats import SchedulerStats
from tokenizer_svc.core.tokenize import PromptTokenizer
from tokenizer_svc.core.vocabulary import Vocabulary
from worker_svc.core.interface import PendingStep, Runner

_WORKER = "local"
_U64 = 2**64 - 1


@dataclass(slots=True)
class Progress:
    """Work done since the start, and the time of the steps that did it (a step of both kinds counts for both)."""

    num_prefill_tokens: int = 0  # computed in chunks of more than one token
    num_decode_tokens: int = 0  # sampled
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def copy(self) -> "Progress":
        """One that does not change any more."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way."""

    pending: PendingStep
    num_prefill_tokens: int


class LLMEngine:
    """Requests in, outputs out, one step at a time; for use by one thread.

    Args:
        vocabulary: the model's text side; the context is cut to what the runner can hold.
        runner: what computes; the engine closes it.
        config: how to schedule.
        seed: where the seeds of requests without one are drawn from.
    """

    def __init__(self, vocabulary: Vocabulary, runner: Runner, config: SchedulerConfig, *, seed: int = 0) -> None:
        limits = runner.limits
        offered = WorkerLimits(
            limits.num_blocks,
            limits.block_size,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.max_num_batched_tokens,
            limits.kinds,
            limits.has_state,
            limits.num_saved_states,
            model_kind=limits.model_kind,
        )
        self._scheduler = Scheduler(config)
        self._takes_priorities = config.scheduling_policy != "fcfs"
        self._scheduler.add_worker(_WORKER, offered)
        capacity = self._scheduler.workers[_WORKER].limits.capacity
        vocabulary = replace(vocabulary, context_length=min(vocabulary.context_length, capacity))
        self.vocabulary = vocabulary
        self.progress = Progress()
        self.runner = runner
        self._seed = seed & _U64
        self.prompt_tokenizer = PromptTokenizer(vocabulary)
        self._detokenizer = Detokenizer(vocabulary.tokenizer)
        self._launched: deque[_Launched] = deque()
        self._ids: dict[str, bytes] = {}
        self._outputs: dict[bytes, RequestOutput] = {}
        self._changed: dict[bytes, RequestOutput] = {}  # to be given out by the next step
        self._num_requests = 0
        self._last_result_s = 0.0
        self._max_step_tokens = self._scheduler.workers[_WORKER].max_num_batched_tokens
        self._num_new_tokens = 0  # of prompts, since a step was launched

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that prompts go through."""
        return self.vocabulary.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike | Prompt,
        params: SamplingParams,
        priority: int = 0,
        *,
        timeout_s: float | None = None,
        clips: bool = False,
        pooling: Pooling | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: any text that no unfinished request has.
            prompt: as `LLM.generate` takes it, or a `Prompt`.
            params: how to generate.
            priority: lower is served first, with the policy "priority" or "fair"; with "fcfs" it must be 0.
            timeout_s: seconds from now after which the request ends with an error; None: never.
            clips: whether `max_tokens` beyond the context are as many as it leaves, instead of an error.
            pooling: how the prompt becomes a vector, which ends the request; None: it is answered.

        Raises:
            PenstockError: the prompt or the priority is wrong, the prompt does not fit, or the model generates nothing
                (the caller's fault); nothing was queued then.
        """
        if request_id in self._ids:
            raise invalid(f"request id {request_id!r} is in use by an unfinished request", "request_id")
        if not is_done_by(self.runner.limits.model_kind, pooling):
            raise wrong_kind(self.runner.limits.model_kind)
        if priority and not self._takes_priorities:
            raise invalid(
                f"priority is {priority}, but requests are served in the order in which they come: leave it out, or "
                'give scheduling_policy="priority" or "fair"',
                "priority",
            )
        prompt = prompt if isinstance(prompt, Prompt) else parse_prompt(prompt)
        now_ns = time.time_ns()
        header = Header(
            request_id=self._num_requests.to_bytes(16, "big"),
            tenant="",
            priority=priority,
            arrival_ns=now_ns,
            deadline_ns=0 if timeout_s is None else now_ns + round(timeout_s * 1e9),
            traceparent="",
            seed=chain.mix(self._seed ^ chain.mix(self._num_requests)) if params.seed is None else params.seed & _U64,
        )
        tokenized = self.prompt_tokenizer.tokenize(Request(header, "", prompt, params, pooling=pooling), clips=clips)
        self._num_requests += 1
        eos_token_ids = () if params.ignore_eos else tokenized.eos_token_ids
        self._detokenizer.open(
            OpenRequest(
                header=header,
                n=params.n,
                num_prompt_tokens=len(tokenized.token_ids),
                text=params.text,
                min_tokens=params.min_tokens,
                stop_token_ids=tokenized.stopping.stop_token_ids,
                eos_token_ids=eos_token_ids,
                wants_logprobs=params.tells_logprobs,
                has_search=params.use_beam_search,
            )
        )
        self._ids[request_id] = header.request_id
        self._outputs[header.request_id] = RequestOutput(
            request_id, prompt.text, tokenized.token_ids.tolist(), new_samples(params)
        )
        queued = QueuedRequest(
            request_id=header.request_id,
            prompt_token_ids=tokenized.token_ids,
            n=params.n,
            sampling=params.sampling.having(tokenized.made),
            stopping=tokenized.stopping,
            seed=header.seed,
            eos_token_ids=tokenized.eos_token_ids,
            priority=priority,
            arrival_ns=now_ns,
            deadline_ns=header.deadline_ns,
            pooling=pooling,
            num_first_tokens=tokenized.num_first_tokens,
            beams=params.beams,
        )
        self._num_new_tokens += len(tokenized.token_ids)
        self._deliver(self._scheduler.add(queued, now_ns))

    def begin(self) -> None:
        """Launch a step if the prompts added since the last one fill it: whoever adds many need not finish first."""
        if self._num_new_tokens >= self._max_step_tokens:
            self._launch_one()

    def abort_request(self, request_id: str) -> None:
        """End a request; the next step gives out what it has, with the finish reason "abort". One that has ended, or
        never was, is no error."""
        if (key := self._ids.get(request_id)) is not None:
            self._deliver(self._scheduler.cancel(key, CancelReason.CLIENT, time.time_ns()))

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything left to do or to give out."""
        return bool(self._ids or self._changed)

    def step(self) -> list[RequestOutput]:
        """Take in the oldest step on its way, after launching as many ahead as the window allows.

        Returns:
            The requests that got tokens or ended, in the order in which they did. Each is the same object every time.

        Raises:
            PenstockError: the device failed, or a defect; the engine is of no further use.
        """
        self._deliver(self._scheduler.expire(time.time_ns()))
        self._launch_ahead()
        if self._launched:
            launched = self._launched.popleft()
            result = launched.pending.result()
            rows = self._scheduler.apply(_WORKER, result, time.time_ns())
            # The device gets its next step before the host looks at the text of this one.
            self._launch_ahead()
            self._measure(launched, len(result.token_ids))
            for request_id, prompt in result.prompts.items():
                if (output := self._outputs.get(request_id)) is not None and output.prompt_logprobs is None:
                    output.prompt_logprobs = [None, *prompt_entries(prompt, self._detokenizer.token_bytes)]
            for request_id, vector in result.vectors.items():
                if (output := self._outputs.get(request_id)) is not None:
                    output.vector = vector
            self._deliver(rows)
        elif self._ids and not self._changed:
            raise PenstockError(ErrorCode.INTERNAL, "requests are waiting and none can run: a defect of the scheduler")
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def stats(self) -> SchedulerStats:
        """The state: what waits, runs and is cached, and totals since the start."""
        return self._scheduler.stats()

    def close(self) -> None:
        """Give the device's memory back; the engine is of no further use."""
        self._launched.clear()
        self.runner.close()

    def _launch_ahead(self) -> None:
        while self._launch_one():
            pass

    def _launch_one(self) -> bool:
        """Return whether there was a step to launch."""
        if not self._launched:
            self._last_result_s = time.perf_counter()
        plan = self._scheduler.schedule(_WORKER, time.time_ns())
        if plan is None:
            return False
        self._num_new_tokens = 0
        self._launched.append(_Launched(self.runner.launch(plan), _num_prefill_tokens(plan)))
        return True

    def _measure(self, launched: _Launched, num_sampled: int) -> None:
        now_s = time.perf_counter()
        elapsed_s, self._last_result_s = now_s - self._last_result_s, now_s
        progress = self.progress
        if launched.num_prefill_tokens:
            progress.num_prefill_tokens += launched.num_prefill_tokens
            progress.prefill_s += elapsed_s
        if num_sampled:
            progress.num_decode_tokens += num_sampled
            progress.decode_s += elapsed_s

    def _deliver(self, rows: TokenRows) -> None:
        if not len(rows):
            return
        effects = self._detokenizer.push(rows)
        for row in effects.rows():
            output = self._outputs[row.request_id]
            output.extend(row)
            self._changed[row.request_id] = output
        for cancel in effects.cancels:
            # The detokenizer has decided this end, so the scheduler has no row to add to it.
            self._scheduler.cancel(cancel.request_id, cancel.reason, time.time_ns(), cancel.sequence)
        for retirement in effects.retirements:
            del self._ids[self._outputs.pop(retirement.request_id).request_id]


def _num_prefill_tokens(plan: StepPlan) -> int:
    return int(plan.num_tokens[plan.num_tokens > 1].sum())
