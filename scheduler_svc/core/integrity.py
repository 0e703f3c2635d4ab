"""The proof that the scheduler's books balance; tests call it after every step."""

from collections import Counter
from collections.abc import Mapping

from scheduler_svc.core.blocks import BlockManager
from scheduler_svc.core.isolation import IsolatingQueue
from scheduler_svc.core.requests import Requests
from scheduler_svc.core.saved_states import SavedStates
from scheduler_svc.core.sequence import SequenceState, Status
from scheduler_svc.core.tables import held_blocks
from scheduler_svc.core.worker import WorkerState


def check_integrity(workers: Mapping[str, WorkerState], requests: Requests) -> None:
    """Compare what is counted with what is there.

    Raises:
        AssertionError: the books do not balance; the message says where.
    """
    waiting, models = requests.waiting, requests.models
    for request_id, request in requests.items():
        live = [sequence for sequence in request.sequences if sequence.status is not Status.ENDED]
        assert request.num_live == len(live) > 0, f"request {request_id.hex()} counts {request.num_live} live sequences"
        for sequence in request.sequences:
            _check_place(sequence, workers, waiting)
        assert request.model_digest is None or not request.may_change_model, f"request {request_id.hex()} is pinned"
        is_begun = any(sequence.status is Status.RUNNING for sequence in request.sequences)
        assert not is_begun or request.model_digest is not None, f"request {request_id.hex()} runs on any model"
    pinned = Counter(each.model_digest for each in requests.values() if each.model_digest is not None)
    assert pinned == models, f"requests of models are counted as {models}, not {pinned}"
    live_waiting = sum(s.status is Status.WAITING for r in requests.values() for s in r.sequences)
    assert len(waiting) == live_waiting, f"{len(waiting)} sequences wait, requests know of {live_waiting}"
    for worker in workers.values():
        held: Counter[int] = Counter()
        for slot, occupant in enumerate(worker.sequences):
            if occupant is not None:
                assert requests.get(occupant.request.request_id) is occupant.request, f"slot {slot} has no request"
                held.update(held_blocks(occupant.tables))
                _check_tables(worker, slot, occupant)
                assert worker.serves(occupant), f"slot {slot} goes on with another model than it began with"
                (_check_parked if worker.is_parked[slot] else _check_slot)(worker, slot, occupant)
        _check_blocks(worker.blocks, held)
        _check_states(worker.states)
        is_whole = not worker.prefilling and not held and all(each.is_pooled for each in worker.running())
        assert is_whole or not worker.computes_whole_prompts, "an encoder computes a prompt in parts, or keeps some"
        free = [slot for slot, occupant in enumerate(worker.sequences) if occupant is None]
        assert sorted(worker.free_slots) == free, "a slot is free and in use, or neither"
        assert worker.num_untold == worker.placed_ns.astype(bool).sum(), "slots whose start is untold are not counted"
        assert not worker.placed_ns[free].any(), "an empty slot has a start to tell"
        assert worker.num_running <= worker.max_num_batched_tokens, "more sequences run than the budget has tokens"
        assert not worker.at_tip[free].any(), "an empty slot is at its tip"
        running = {sequence.request for sequence in worker.running()}
        assert len(running) <= 1 or not any(map(waiting.tolerance.is_suspect, running)), "a suspect does not run alone"


def _check_place(sequence: SequenceState, workers: Mapping[str, WorkerState], waiting: IsolatingQueue) -> None:
    assert (sequence.status is Status.WAITING) == (sequence in waiting), f"{_name(sequence)} waits in one book only"
    if sequence.status is Status.RUNNING:
        assert workers[sequence.worker_id].sequences[sequence.slot] is sequence, f"{_name(sequence)} is not in its slot"
    else:
        assert not sequence.tables, f"{_name(sequence)} holds blocks without running"
        assert (sequence.worker_id, sequence.slot) == ("", -1), f"{_name(sequence)} has a slot without running"


def _name(sequence: SequenceState) -> str:
    return f"sequence {sequence.index} of {sequence.request.request_id.hex()}"


def _check_slot(worker: WorkerState, slot: int, sequence: SequenceState) -> None:
    columns = worker.num_tokens, worker.num_computed_tokens, worker.num_received_tokens
    num_tokens, num_computed, num_received = (int(column[slot]) for column in columns)
    name = f"slot {slot} of {worker.worker_id}"
    assert num_received == sequence.num_tokens, f"{name} has received {num_received} tokens, not {sequence.num_tokens}"
    planned = sum(
        int(((step.slots == slot) & (step.generations == worker.generation[slot])).sum()) for step in worker.in_flight
    )
    assert num_tokens == num_received + planned, f"{name} has {num_tokens} of {num_received} and {planned} tokens"
    assert 0 <= num_computed < num_tokens, f"{name} has computed {num_computed} of {num_tokens} tokens"
    assert worker.at_tip[slot] == (sequence not in worker.prefilling), f"{name} is and is not at its tip"
    assert num_tokens - num_computed == 1 or not worker.at_tip[slot], f"{name} is not at its tip"
    most = int(worker.max_num_tokens[slot])
    assert num_tokens - sequence.is_pooled <= most <= worker.limits.capacity, f"{name} is planned beyond its end"
    assert num_computed <= int(worker.capacity[slot]), f"{name} has computed beyond its blocks"
    assert not worker.at_tip[slot] or not sequence.save_at, f"{name} has computed past where its state is to be saved"
    assert all(point > num_computed for point in sequence.save_at), f"{name} has not saved its state"
    for kind, table in zip(worker.limits.kinds, sequence.tables, strict=True):
        for block in table.blocks[max(0, num_computed // kind.block_size - table.first) :]:
            assert worker.blocks.ref_counts[block] == 1, f"{name} writes into a shared block"


def _check_tables(worker: WorkerState, slot: int, sequence: SequenceState) -> None:
    """Of each kind, a sequence has all that a token to come sees, and no more than it may hold."""
    name, limits = f"slot {slot} of {worker.worker_id}", worker.limits
    position = min(int(worker.num_computed_tokens[slot]), int(worker.num_received_tokens[slot]) - 1)
    # Blocks of planned steps that gave no token stay for the tokens to come.
    num_tokens = int(worker.num_tokens[slot]) + limits.max_plans
    for kind, table in zip(limits.kinds, sequence.tables, strict=True):
        assert table.first <= kind.first_seen(position), f"{name} has given up what its next token sees"
        most = kind.most_blocks(num_tokens, limits.longest_step)
        assert len(table.blocks) <= most, f"{name} holds {len(table.blocks)} blocks of a kind, not up to {most}"
        given_up_at = kind.unseen_from(table.first)
        is_noted = given_up_at is None or int(worker.gives_up_at[slot]) <= given_up_at
        assert is_noted, f"{name} does not know when it gives up a block"
    assert int(worker.capacity[slot]) == worker.rules.room(sequence.tables), f"{name} has lost count of its blocks"


def _check_parked(worker: WorkerState, slot: int, sequence: SequenceState) -> None:
    name, request = f"slot {slot} of {worker.worker_id}", sequence.request
    assert sequence.has_found or request in worker.forking, f"{name} is kept for nothing"
    assert not worker.at_tip[slot], f"{name} is kept, and decodes"
    assert sequence not in worker.prefilling, f"{name} is kept, and computes its prompt"
    width = 0 if request.search is None else request.search.width
    places = {each.worker_id for each in request.sequences[:width]}
    assert request in worker.forking or places == {worker.worker_id}, f"{name} is kept from a beam that waits"


def _check_states(states: SavedStates) -> None:
    places = sorted([*states.empty, *states.hashes])
    assert places == list(states.indices), "a saved state has leaked"
    assert {block_hash: index for index, block_hash in states.hashes.items()} == states.found, "saved states differ"


def _check_blocks(blocks: BlockManager, held: Counter[int]) -> None:
    free = [*blocks.empty, *blocks.idle]
    assert len(set(free)) == len(free), "a block is free twice"
    for block in range(blocks.num_blocks):
        assert blocks.ref_counts[block] == held[block], f"block {block} is held {held[block]} times, not as counted"
    assert sorted(free) == [block for block in range(blocks.num_blocks) if not held[block]], "a block has leaked"
    assert all(blocks.hashes[block] is None for block in blocks.empty), "an empty block has content"
    assert all(blocks.hashes[block] is not None for block in blocks.idle), "an idle block has no content"
    content = {block_hash: block for block, block_hash in enumerate(blocks.hashes) if block_hash is not None}
    assert content == blocks.found, "the prefix cache and its blocks differ"
    for name, counted, there in (("used", blocks.map.used, held), ("cached", blocks.map.cached, blocks.idle)):
        groups = Counter(block // blocks.map.group_size for block in there)
        assert counted == [groups[group] for group in range(len(counted))], f"the map counts other {name} blocks"
