"""A runner without a model: fixed step time, deterministic tokens. It makes the pipeline testable at full speed, and
notices mistakes in it: each token is derived from what stands in the blocks that the slot's table names, so that a
wrong, shared or too early freed block changes the output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from llguidance import LLTokenizer

from contract.domain import chain
from contract.domain.plan import NO_TOKENS, U32, Admission, Logprobs, StepPlan, StepResult
from worker_svc.core.batch import Batch, build_batch, tokens_of
from worker_svc.core.grammars import SlotGrammars
from worker_svc.core.interface import Limits
from worker_svc.core.pretended_cache import BASE, PretendedCache, token_hashes
from worker_svc.core.pretended_device import PendingSimulatedStep, PretendedDevice
from worker_svc.core.pretended_model import (
    HIDDEN_SIZE,
    U64,
    choose_allowed,
    chosen_logprobs,
    complete_prompts,
    drawn_tokens,
    hidden_states,
    is_allowed,
    next_allowed,
    salt,
    token_logprobs,
)
from worker_svc.core.pretended_states import PretendedStates
from worker_svc.core.prompt_logprobs import PromptRows, SlotPrompts
from worker_svc.core.prompt_vectors import SlotVectors, VectorRows
from worker_svc.core.script import Script, scripted
from worker_svc.core.slots import F32, I64, HostSlots

_MASK = 2**64 - 1
_NO_LOGPROBS = -1
_FOREIGN = BASE >> 1  # what a state of other tokens does to a hash
_FIRST_SLOT = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """The behaviour of the pretended model. The limits' EOS ids are emitted only where `eos_every` says so."""

    step_s: float = 0.002  # device time of every step, seconds
    eos_every: int = 0  # about one token in so many is EOS; 0: none is
    model_seed: int = 0  # models with different ones give different tokens
    min_tokens_per_step: int = 1  # a slot that samples gets a pseudo-random number of tokens between these two,
    max_tokens_per_step: int = 1  # as far as the plan lets it advance; the tokens themselves stay the same
    script: Script | None = None  # what it answers, unless a grammar forbids it; None: all tokens are drawn
    hidden_size: int = HIDDEN_SIZE  # of its vectors


class SimulatedRunner:
    """Implement `Runner`. The device begins a step when the one before has ended; `sleep` takes seconds."""

    def __init__(
        self,
        limits: Limits,
        config: SimulatedConfig,
        clock_ns: Callable[[], int],
        sleep: Callable[[float], None],
        grammar_tokens: Callable[[], LLTokenizer] | None = None,
    ) -> None:
        """`grammar_tokens`: those of the pretended model; None: no sequence may have a grammar."""
        if limits.has_state and not config.min_tokens_per_step:
            raise ValueError("with a state no step may give a slot no token: its position is not computed again")
        self._limits = limits
        self._config = config
        self._device = PretendedDevice(config.step_s, clock_ns, sleep)
        self._slots = HostSlots(limits)
        self._tokens = np.zeros((limits.max_num_seqs, self._slots.max_tokens), np.uint32)
        self._salts = np.zeros(limits.max_num_seqs, np.uint64)
        self._num_logprobs = np.full(limits.max_num_seqs, _NO_LOGPROBS, np.int64)
        self._chosen: dict[int, U32] = {}  # by slot: tokens whose logprobs are wanted instead
        self._min_tokens = np.zeros(limits.max_num_seqs, np.int64)  # stop ids are forbidden below this position
        self._stop_ids: dict[int, tuple[int, ...]] = {}
        self._grammars = SlotGrammars(grammar_tokens, limits.vocab_size)
        self._answers: dict[int, tuple[int, ...]] = {}  # by slot, of sequences that the script has an answer for
        self._prompt_lens: dict[int, int] = {}  # by slot, of the same
        self._failures: dict[int, str] = {}  # of the step
        self._cache = PretendedCache(limits.num_blocks, limits.block_size, limits.num_pages)
        self._states = PretendedStates(limits.num_states, self._slots.max_tokens) if limits.has_state else None
        self._prompts = SlotPrompts(limits.vocab_size)
        self._prompt_rows: PromptRows | None = None  # of the step
        self._pooled = SlotVectors()
        self._vectors: Mapping[bytes, F32] = {}  # of the step
        self._finished_slots = NO_TOKENS  # of the step: those whose prompts are pooled now

    @property
    def limits(self) -> Limits:
        """Implement `Runner.limits`."""
        return self._limits

    def launch(self, plan: StepPlan) -> PendingSimulatedStep:
        """Implement `Runner.launch`."""
        times = self._device.next_step()
        self._update_slots(plan)
        self._failures = {}
        slots, counts, token_ids = self._compute(plan)
        self._save_states(plan)
        result = StepResult(
            step=plan.step,
            slots=np.concatenate((slots.astype(np.uint32), self._finished_slots)),
            counts=np.concatenate((counts.astype(np.uint32), np.zeros_like(self._finished_slots))),
            token_ids=token_ids,
            logprobs=self._logprobs(slots, counts, token_ids),
            step_ns=times.step_ns,
            idle_ns=times.idle_ns,
            failures=self._failures,
            prompts=complete_prompts(self._prompt_rows, self._limits.vocab_size),
            vectors=self._vectors,
        )
        return self._device.launch(times, result)

    def close(self) -> None:
        """Implement `Runner.close`."""
        del self._cache, self._tokens

    def _logprobs(self, slots: I64, counts: I64, token_ids: U32) -> Logprobs | None:
        told = token_logprobs(self._num_logprobs[slots], counts, token_ids, self._limits.vocab_size)
        if told is None or not self._chosen:
            return told
        ends = np.cumsum(told.top_counts)
        for token, slot in enumerate(np.repeat(slots, counts).tolist()):
            if (chosen := self._chosen.get(slot)) is not None:
                place = slice(int(ends[token]) - len(chosen), int(ends[token]))
                told.top_ids[place], told.top_logprobs[place] = chosen, chosen_logprobs(chosen)
        return told

    def _update_slots(self, plan: StepPlan) -> None:
        state = self._slots
        if plan.step == 1:
            state.clear()
            self._grammars.clear()
            self._prompts.clear()
            self._pooled.clear()
            self._cache.poison_all()
        state.release(plan.released_slots)
        self._grammars.release(plan.released_slots)
        self._prompts.release(plan.released_slots)
        self._pooled.release(plan.released_slots)
        for admission in plan.admissions:
            self._admit(admission)
        state.append(plan)
        self._cache.poison(plan.append_blocks)
        state.check_copies(plan)
        self._cache.copy(plan.copy_sources, plan.copy_targets)
        copies = [(each.source_state, each.slot) for each in plan.admissions if each.source_state is not None]
        if self._states is not None and copies:
            self._states.copy(*np.array(copies, np.int64).T)
        state.check_saves(plan)

    def _save_states(self, plan: StepPlan) -> None:
        if self._states is not None:
            self._states.copy(plan.save_slots.astype(np.int64), plan.save_states.astype(np.int64))

    def _admit(self, admission: Admission) -> None:
        self._slots.admit(admission)
        self._grammars.remember(admission)
        self._prompts.admit(admission)
        self._pooled.admit(admission)
        slot, sampling = admission.slot, admission.sampling
        self._tokens[slot, : len(admission.token_ids)] = admission.token_ids
        self._salts[slot] = salt(sampling, admission.seed, self._config.model_seed)
        self._num_logprobs[slot] = _NO_LOGPROBS if sampling.num_logprobs is None else sampling.num_logprobs
        self._chosen.pop(slot, None)
        if sampling.logprob_token_ids:
            self._chosen[slot] = np.array(sampling.logprob_token_ids, np.uint32)
            self._num_logprobs[slot] = len(sampling.logprob_token_ids)
        self._stop_ids[slot] = admission.stop_token_ids
        self._min_tokens[slot] = admission.num_prompt_tokens + admission.min_output_tokens
        self._answers.pop(slot, None)
        if self._config.script is not None:
            prompt_ids = admission.token_ids[: admission.num_prompt_tokens].tolist()
            if answer := self._config.script.answer(prompt_ids):
                self._answers[slot], self._prompt_lens[slot] = answer, len(prompt_ids)
        # Blocks that hold computed tokens came from another sequence; what was in the others is of no use to this one.
        for kind, (first, blocks) in zip(self._limits.kinds, admission.tables, strict=True):
            self._cache.poison(blocks[max(0, kind.num_blocks(admission.num_computed_tokens) - first) :])

    def _compute(self, plan: StepPlan) -> tuple[I64, I64, U32]:
        """Advance the plan's slots: (slots that sample, tokens of each, the tokens).

        A slot that samples is afterwards one token behind what it knows, however many tokens it got.
        """
        state = self._slots
        planned, slots = plan.num_tokens.astype(np.int64), plan.slots.astype(np.int64)
        behind = state.num_tokens[slots] - state.num_computed[slots]
        batch = build_batch(slots, np.minimum(planned, behind), state)
        self._prompt_rows = self._prompts.take(batch)
        self._write(batch)
        self._pool(batch, self._pooled.take(batch))
        sampling = batch.slots[batch.samples]
        if self._config.min_tokens_per_step == self._config.max_tokens_per_step == 1:
            return sampling, np.ones(len(sampling), np.int64), self._sample(sampling)
        counts = self._counts(plan.step, sampling, (planned - behind)[batch.samples] + 1)
        columns = np.zeros((len(sampling), int(counts.max(initial=0))), np.uint32)
        for index in range(columns.shape[1]):
            going = counts > index
            if index:
                self._write(build_batch(sampling[going], np.ones(int(going.sum()), np.int64), state))
            columns[going, index] = self._sample(sampling[going])
        state.num_computed[sampling[counts == 0]] -= 1
        return sampling, counts, columns[np.arange(columns.shape[1]) < counts[:, None]]

    def _pool(self, batch: Batch, rows: VectorRows | None) -> None:
        """Pool the prompts of a batch whose tokens are written: each hidden state follows from all tokens up to it."""
        self._vectors, self._finished_slots = {}, NO_TOKENS
        if rows is None:
            return
        tokens = tokens_of(batch, self._slots)
        slots, num_tokens = tokens.slots[rows.rows], tokens.positions[rows.rows] + 1
        hashes = self._context_hashes(slots, num_tokens)
        sums = np.zeros((len(rows.shares), self._config.hidden_size), np.float32)
        np.add.at(sums, rows.owners, hidden_states(hashes, self._config.hidden_size, self._config.model_seed))
        self._vectors, self._finished_slots = rows.complete(sums), rows.finished_slots

    def _context_hashes(self, slots: I64, num_tokens: I64) -> U64:
        """Hashes u64[rows] of the first `num_tokens` i64[rows] tokens of `slots`, as far as layers see them: what is in
        the cache of those that see all, or else the tokens that are known; others where one that sees less has foreign
        ones."""
        tables, longest = self._slots.block_tables, int(num_tokens.max(initial=0))
        width = longest // self._limits.block_size + 1
        hashes: U64 | None = None
        for index, kind in enumerate(self._limits.kinds):
            if kind.sees_all:
                hashes = self._cache.context_hashes(tables[index][slots, :width], num_tokens)
        narrow = [(index, kind) for index, kind in enumerate(self._limits.kinds) if not kind.sees_all]
        if hashes is not None and not narrow:
            return hashes
        token_ids = self._tokens[slots, :longest]
        hashes = token_hashes(token_ids, num_tokens) if hashes is None else hashes
        for index, kind in narrow:
            firsts = np.array([kind.reach.first_seen(each - 1) for each in num_tokens.tolist()], np.int64)
            foreign = self._cache.are_foreign(tables[index][slots, :width], token_ids, firsts, num_tokens)
            hashes ^= np.where(foreign, np.uint64(BASE), np.uint64(0))
        return hashes

    def _write(self, batch: Batch) -> None:
        tokens = tokens_of(batch, self._slots)
        for slot_mapping in tokens.slot_mappings:
            self._cache.write(slot_mapping, self._tokens[tokens.slots, tokens.positions])
        if self._states is not None:
            self._states.take_in(tokens.slots, tokens.positions, self._tokens[tokens.slots, tokens.positions])
        self._slots.num_computed[batch.slots] = batch.context_lens

    def _counts(self, step: int, slots: I64, room: I64) -> I64:
        low, high = self._config.min_tokens_per_step, self._config.max_tokens_per_step
        drawn = chain.mix_columns(slots.astype(np.uint64) ^ np.uint64(chain.mix(step))) % np.uint64(high - low + 1)
        return np.minimum(drawn.astype(np.int64) + low, room)

    def _sample(self, slots: I64) -> U32:
        """The next token of slots whose tokens are all computed, entered into their histories."""
        state = self._slots
        positions = state.num_tokens[slots]
        hashes = self._context_hashes(slots, positions)
        if self._states is not None:
            hashes ^= np.where(self._states.are_foreign(slots, hashes), np.uint64(_FOREIGN), np.uint64(0))
        hashes ^= positions.astype(np.uint64)
        drawn = chain.mix_columns(chain.mix_columns(hashes) ^ self._salts[slots])
        token_ids = drawn_tokens(drawn, self._limits, self._config.eos_every)
        for row in (positions < self._min_tokens[slots]).nonzero()[0].tolist():
            stop_ids = self._stop_ids[int(slots[row])]
            token_ids[row] = next_allowed(int(token_ids[row]), stop_ids, self._limits.vocab_size)
        for row, slot in enumerate(slots.tolist()) if self._answers else ():
            if slot in self._answers:
                at = int(positions[row]) - self._prompt_lens[slot]
                token_ids[row] = scripted(self._answers[slot], at, int(token_ids[row]))
        self._follow(slots, drawn, token_ids)
        self._tokens[slots, positions] = token_ids
        state.num_tokens[slots] += 1
        return token_ids

    def _follow(self, slots: I64, drawn: U64, token_ids: U32) -> None:
        """Draw the tokens of sequences with a grammar among those that may come."""
        followers = self._grammars.of(slots)
        if not followers:
            return
        masks = self._grammars.masks(followers)
        self._failures |= {int(slots[row]): why for row, follower in followers if (why := follower.failure())}
        for words, row in zip(masks.words, masks.rows.tolist(), strict=True):
            if int(slots[row]) not in self._answers or not is_allowed(int(token_ids[row]), words):
                token_ids[row] = choose_allowed(int(drawn[row]), words, self._limits.vocab_size)
        self._grammars.follow((follower, int(token_ids[row])) for row, follower in followers)
