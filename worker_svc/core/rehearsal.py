"""A short run of a model with all that schedulers do: chunks, mixed batches, blocks that prompts share, a sequence that
is preempted and recomputed while others have its blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from contract.domain.kv_kinds import KVKind
from contract.domain.params import Sampling
from contract.domain.plan import Admission, Logprobs, StepPlan, StepResult
from worker_svc.core.interface import Limits, Runner

BLOCK_SIZE, MAX_NUM_SEQS = 4, 4
_LONGEST = 56  # tokens of a sequence
_LONG, _SHORT, _OTHER, _OWN = 44, 9, 11, 10  # tokens of prompts; of the last one after what it shares
_CHUNK, _SHARED = 13, 16  # tokens that are shared: at least
_LAST_STEPS = 6

Row = npt.NDArray[np.float32]


@dataclass(eq=False)
class Line:
    """A sequence: its tokens, and what was said of them."""

    slot: int
    token_ids: list[int]
    num_prompt: int
    logprobs: dict[int, Row] = field(default_factory=dict)  # by index of a token: f32[vocab_size], what may stand there


def limits_of(vocab_size: int, max_model_len: int, kinds: tuple[KVKind, ...]) -> Limits:
    """The limits that `rehearse` keeps to; contexts of at least 56 tokens."""
    num_blocks = MAX_NUM_SEQS * sum(kind.num_blocks(_LONGEST) for kind in kinds)
    return Limits(num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, max_model_len, max_model_len, vocab_size, kinds=kinds)


def rehearse(runner: Runner, seed: int = 0) -> Sequence[Line]:
    """All sequences, with the log-probabilities of every token that was computed but what blocks already had."""
    kinds = runner.limits.kinds
    largest = max(kind.block_size for kind in kinds)
    num_shared = -(-_SHARED // largest) * largest
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, runner.limits.vocab_size, size).tolist() for size in (_LONG, _SHORT, _OTHER, _OWN)]
    long, short, other = (Line(slot, prompt, len(prompt)) for slot, prompt in enumerate(prompts[:3]))
    sharing = Line(3, long.token_ids[:num_shared] + prompts[3], num_shared + _OWN)
    blocks = iter(range(runner.limits.num_blocks - 1, -1, -1))
    of_long, of_short, own, others = ([_table(kind, blocks) for kind in kinds] for _ in range(4))
    shared = [num_shared // kind.block_size for kind in kinds]
    of_sharing = [mine[:count] + rest[count:] for mine, rest, count in zip(of_long, own, shared, strict=True)]
    stage = _Stage(runner)
    stage.enter(long, of_long)
    stage.step({long: _CHUNK})
    stage.enter(short, of_short)
    stage.step({short: _SHORT, long: _CHUNK})
    stage.step({long: _CHUNK, short: 1})
    stage.leave(short)
    stage.enter(other, of_short)
    stage.enter(sharing, of_sharing, num_computed=num_shared)
    stage.step({long: _LONG - 3 * _CHUNK, other: _OTHER, sharing: _OWN})
    stage.step({other: 1, long: 1, sharing: 1})
    stage.enter(short, others)
    stage.step({long: 1, short: 5, other: 1, sharing: 1})
    stage.step({long: 1, other: 1, sharing: 1, short: len(short.token_ids) - 5})
    for _ in range(_LAST_STEPS):
        stage.step({long: 1, other: 1, sharing: 1, short: 1})
    return long, short, other, sharing


def _table(kind: KVKind, blocks: Iterator[int]) -> list[int]:
    """The next of `blocks`, for a whole sequence."""
    return list(islice(blocks, kind.num_blocks(_LONGEST)))


class _Stage:
    """Plans made by hand, each of which is carried out at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._num_top = runner.limits.vocab_size
        self._step = 0
        self._lines: dict[int, Line] = {}
        self._admissions: list[Admission] = []
        self._released: list[int] = []

    def enter(self, line: Line, tables: Sequence[Sequence[int]], num_computed: int = 0) -> None:
        """With the next step; the blocks of each kind of layers are all that it will need."""
        is_new = line.num_prompt == len(line.token_ids) and not num_computed
        sampling = Sampling(temperature=0.0, num_logprobs=self._num_top, num_prompt_logprobs=self._num_top)
        self._admissions.append(
            Admission(
                slot=line.slot,
                token_ids=np.array(line.token_ids, np.uint32),
                num_prompt_tokens=line.num_prompt,
                num_computed_tokens=num_computed,
                block_ids=np.concatenate(tables).astype(np.uint32),
                block_counts=np.array([len(table) for table in tables], np.uint32),
                sampling=sampling,
                seed=0,
                request_id=line.slot.to_bytes(16, "big"),
                prompt_logprobs=is_new,
            )
        )
        self._lines[line.slot] = line

    def leave(self, line: Line) -> None:
        """With the next step."""
        self._released.append(line.slot)

    def step(self, advances: Mapping[Line, int]) -> None:
        """Advance by so many tokens each."""
        self._step += 1
        plan = StepPlan(
            step=self._step,
            released_slots=np.array(self._released, np.uint32),
            admissions=tuple(self._admissions),
            slots=np.array([line.slot for line in advances], np.uint32),
            num_tokens=np.array(list(advances.values()), np.uint32),
        )
        self._admissions, self._released = [], []
        self._hear(self._runner.launch(plan).result())

    def _hear(self, result: StepResult) -> None:
        for request_id, prompt in result.prompts.items():
            line = self._lines[int.from_bytes(request_id, "big")]
            line.logprobs |= dict(enumerate(_rows(prompt.logprobs, self._num_top), 1))
        if result.logprobs is None:
            return
        rows = _rows(result.logprobs, self._num_top)
        for slot, token_id, row in zip(result.slots.tolist(), result.token_ids.tolist(), rows, strict=True):
            line = self._lines[slot]
            line.logprobs[len(line.token_ids)] = row
            line.token_ids.append(token_id)


def _rows(logprobs: Logprobs, vocab_size: int) -> list[Row]:
    """f32[vocab_size] for each token."""
    ids = logprobs.top_ids.reshape(-1, vocab_size).astype(np.int64)
    rows = np.full(ids.shape, np.nan, np.float32)
    np.put_along_axis(rows, ids, logprobs.top_logprobs.reshape(-1, vocab_size), 1)
    return list(rows)
