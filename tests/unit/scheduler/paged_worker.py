"""A worker that takes the block table at its word.

Its KV of a token is a hash of the token and of the KV before it, written to and read back from the pretended cache
through the block tables of all kinds, as far as a token sees it. A wrong, shared or too early reused or given up block
changes what is read, and fails an assertion. So does, where layers keep a state, one in a slot that is not of exactly
the tokens that are computed.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from contract.domain import chain
from contract.domain.plan import Admission, Logprobs, StepPlan, StepResult
from scheduler_svc.core.limits import WorkerLimits

VOCAB = 11


def next_token(kv: int, seed: int, position: int, masked: Collection[int]) -> int:
    """What is sampled after a sequence of `position` tokens whose last KV is `kv`."""
    draw = chain.mix(kv ^ chain.mix(seed ^ position))
    return [token for token in range(VOCAB) if token not in masked][draw % (VOCAB - len(masked))]


def likeliest(kv: int, count: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens after a sequence whose last KV is `kv`, and their logprobs, whatever is sampled."""
    logits = np.array([chain.mix(kv ^ chain.mix(~token & 2**64 - 1)) % 4096 / 1024 for token in range(VOCAB)])
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    order = np.argsort(-logprobs, kind="stable")[:count]
    return order.tolist(), logprobs[order].tolist()


@dataclass
class Slot:
    tokens: list[int]
    num_computed: int
    tables: list[dict[int, int]]  # by kind: block by index
    admission: Admission


class PagedWorker:
    def __init__(self, limits: WorkerLimits, model_digest: bytes = b"") -> None:
        self.limits = limits
        self.model_digest = model_digest
        self.kv: dict[tuple[int, int], int] = {}  # by block and offset
        self.owners: dict[int, int] = {}  # by block: the kind that wrote in it last
        self.slots: dict[int, Slot] = {}
        self.states: dict[
            int, tuple[int, int]
        ] = {}  # by index: the number of tokens that it has taken in, and their KV
        self.tips: dict[int, int] = {}  # by slot: the last KV of those that sampled in the last step
        self.num_copies = 0
        self.num_saved = 0  # states
        self.num_computed = 0

    def execute(self, plan: StepPlan, silent: Collection[int] = ()) -> StepResult:
        """Carry out one plan; the slots in `silent` get no token although they could."""
        for slot in plan.released_slots.tolist():
            del self.slots[slot]
        for new in plan.admissions:
            assert new.slot not in self.slots
            assert new.slot < self.limits.max_num_seqs
            tables = [dict(enumerate(blocks.tolist(), first)) for first, blocks in new.tables]
            assert len(tables) == len(self.limits.kinds)
            self.slots[new.slot] = Slot(new.token_ids.tolist(), new.num_computed_tokens, tables, new)
        kinds = plan.append_kinds.tolist() or [0] * len(plan.append_slots)
        for slot, kind, block in zip(plan.append_slots.tolist(), kinds, plan.append_blocks.tolist(), strict=True):
            table = self.slots[slot].tables[kind]
            table[max(table, default=self._first(slot, kind) - 1) + 1] = block
        self._copy(plan)
        self._copy_states(plan)
        sampled = self._compute(plan, silent)
        self._save_states(plan)
        return StepResult(
            step=plan.step,
            slots=np.array([slot for slot, _ in sampled], np.uint32),
            counts=np.array([len(tokens) for _, tokens in sampled], np.uint32),
            token_ids=np.array([token for _, tokens in sampled for token in tokens], np.uint32),
            logprobs=self._logprobs([slot for slot, tokens in sampled for _ in tokens]),
        )

    def _logprobs(self, slots: list[int]) -> Logprobs | None:
        """Of one token for each of `slots`."""
        wanted = [self.slots[slot].admission.sampling.num_logprobs for slot in slots]
        if not any(wanted):
            return None
        tops = [likeliest(self.tips[slot], count or 0) for slot, count in zip(slots, wanted, strict=True)]
        return Logprobs(
            sampled=np.full(len(slots), np.nan, np.float32),
            ranks=np.zeros(len(slots), np.uint32),
            top_counts=np.array([len(ids) for ids, _ in tops], np.uint32),
            top_ids=np.array([token for ids, _ in tops for token in ids], np.uint32),
            top_logprobs=np.array([value for _, values in tops for value in values], np.float32),
        )

    def _copy(self, plan: StepPlan) -> None:
        targets = plan.copy_targets.tolist()
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(plan.copy_sources.tolist()), "copies must not depend on their order"
        for source, target in zip(plan.copy_sources.tolist(), targets, strict=True):
            self.num_copies += 1
            self.owners[target] = self.owners.get(source, 0)
            for offset in range(max(kind.block_size for kind in self.limits.kinds)):
                self.kv.pop((target, offset), None)
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]

    def _copy_states(self, plan: StepPlan) -> None:
        if self.limits.has_state:
            for new in plan.admissions:
                assert (new.source_state is not None) == (new.num_computed_tokens > 0), "computed tokens need a state"
            copied = {
                new.slot: self.states[new.source_state] for new in plan.admissions if new.source_state is not None
            }
            self.states |= copied
        else:
            assert all(new.source_state is None for new in plan.admissions)

    def _save_states(self, plan: StepPlan) -> None:
        assert len(set(plan.save_states.tolist())) == len(plan.save_states), "two states are saved as one"
        for slot, index in zip(plan.save_slots.tolist(), plan.save_states.tolist(), strict=True):
            assert slot in plan.slots.tolist(), "the state of a slot that computes nothing is saved"
            assert 0 <= index - self.limits.max_num_seqs < self.limits.num_saved_states, "there is no such state"
            self.states[index] = self.states[slot]
            self.num_saved += 1

    def _compute(self, plan: StepPlan, silent: Collection[int]) -> list[tuple[int, list[int]]]:
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert int(plan.num_tokens.sum()) <= self.limits.max_num_batched_tokens
        written: dict[tuple[int, int, int], int] = {}  # a step does not see what other slots compute in it
        tips = []
        for index, num_tokens in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            slot = self.slots[index]
            assert 0 < num_tokens <= len(slot.tokens) - slot.num_computed
            if self.limits.model_kind.computes_whole_prompts:
                assert slot.admission.pooling is not None, "an encoder is to generate"
                assert (slot.num_computed, num_tokens) == (0, len(slot.tokens)), "a prompt is not computed whole"
            kv = self._read(slot, slot.num_computed)
            self.num_computed += num_tokens
            for position in range(slot.num_computed, slot.num_computed + num_tokens):
                kv = chain.mix(kv ^ slot.tokens[position])
                for kind in range(len(self.limits.kinds)):
                    place = self._place(slot, position, kind)
                    assert (kind, *place) not in written, "two slots write to one place"
                    written[kind, *place] = kv
            if self.limits.has_state:
                state = self.states[index] if slot.num_computed else (0, _start(self.model_digest))
                before = slot.tokens[: slot.num_computed]
                assert state == (slot.num_computed, kv_after(before, self.model_digest)), "a foreign or stale state"
                self.states[index] = slot.num_computed + num_tokens, kv
            slot.num_computed += num_tokens
            if slot.num_computed == len(slot.tokens):
                tips.append((index, kv))
        for (kind, block, offset), kv in written.items():
            if self.owners.get(block, kind) != kind:
                for place in [place for place in self.kv if place[0] == block]:
                    del self.kv[place]
            self.owners[block] = kind
            self.kv[block, offset] = kv
        self.tips = dict(tips)
        return [(index, self._sample(self.slots[index], kv, index in silent)) for index, kv in tips]

    def _sample(self, slot: Slot, kv: int, is_silent: bool) -> list[int]:
        if slot.admission.pooling is not None:
            return []
        if is_silent:
            slot.num_computed -= 1
            return []
        num_output = len(slot.tokens) - slot.admission.num_prompt_tokens
        masked = slot.admission.stop_token_ids if num_output < slot.admission.min_output_tokens else ()
        slot.tokens.append(next_token(kv, slot.admission.seed, len(slot.tokens), masked))
        return slot.tokens[-1:]

    def _read(self, slot: Slot, num_tokens: int) -> int:
        """The KV of the last of the first `num_tokens`, each that the next token sees read through the tables and
        compared with its tokens."""
        kv = _start(self.model_digest)
        for position in range(num_tokens):
            kv = chain.mix(kv ^ slot.tokens[position])
            for index, kind in enumerate(self.limits.kinds):
                if position >= kind.reach.first_seen(num_tokens):
                    place = self._place(slot, position, index)
                    found = self.kv.get(place) if self.owners.get(place[0]) == index else None
                    assert found == kv, f"position {position} reads foreign or missing KV in block {place[0]}"
        return kv

    def _place(self, slot: Slot, position: int, kind: int) -> tuple[int, int]:
        size = self.limits.kinds[kind].block_size
        return slot.tables[kind][position // size], position % size

    def _first(self, slot: int, kind: int) -> int:
        """Index of the first block of a table that has none."""
        return self.slots[slot].admission.tables[kind][0]


def _start(model_digest: bytes) -> int:
    """The KV before the first token: another for each model."""
    return int.from_bytes(model_digest)


def kv_after(tokens: Collection[int], model_digest: bytes = b"") -> int:
    """The KV of the last of some tokens."""
    kv = _start(model_digest)
    for token in tokens:
        kv = chain.mix(kv ^ token)
    return kv


def reference(  # noqa: PLR0917
    prompt: Collection[int],
    seed: int,
    stops: Collection[int],
    min_tokens: int,
    max_num_tokens: int,
    model_digest: bytes = b"",
) -> tuple[list[int], bool]:
    """The output of an undisturbed sequence, and whether a stop id ended it."""
    kv = _start(model_digest)
    for token in prompt:
        kv = chain.mix(kv ^ token)
    output: list[int] = []
    while True:
        masked = stops if len(output) < min_tokens else ()
        token = next_token(kv, seed, len(prompt) + len(output), masked)
        output.append(token)
        if token in stops:
            return output, True
        if len(prompt) + len(output) >= max_num_tokens:
            return output, False
        kv = chain.mix(kv ^ token)
