"""Random bytes and mutated messages in every stream: no crash, no hang, counted, and the next request is served."""

import random
from collections import deque
from typing import Any

import pytest
from fired_at import FiredAt
from in_memory import wait_until
from mutations import ROUNDS, SEED, mutated_fields, random_bytes

from contract.domain.params import SamplingParams
from gateway_svc import wire
from gateway_svc.core.streams import DeliveredSequence
from servicekit.bus import keys as k

STREAMS = ("prompts", "requests", "cancels", "steps", "results", "tokens", "attach", "text", "dead")
ENTRIES_A_VOLLEY = 10


class Recorder:
    """What stood in each stream."""

    def __init__(self, pipeline: FiredAt) -> None:
        self.seen: dict[bytes, deque[dict[bytes, bytes]]] = {}
        commands = pipeline.bus.server._commands  # type: ignore[attr-defined]
        add = commands[b"XADD"]

        def recorded(name: bytes, *words: bytes) -> Any:
            fields = words[words.index(b"*") + 1 :]
            seen = self.seen.setdefault(name, deque(maxlen=64))
            seen.append(dict(zip(fields[::2], fields[1::2], strict=True)))
            return add(name, *words)

        commands[b"XADD"] = recorded


@pytest.fixture(scope="module")
def valid(pipeline: FiredAt) -> dict[str, tuple[bytes, list[dict[bytes, bytes]]]]:
    """Each stream's name, and entries that are right."""
    recorder = Recorder(pipeline)
    for number in range(4):
        pipeline.client.complete([number, 1, 2], SamplingParams(n=2, max_tokens=20, stop=["zz"], logprobs=2))
    pipeline.client.complete("some text", SamplingParams(temperature=0, max_tokens=3))
    keys, route = pipeline.bus.keys, pipeline.gateway_session()
    shard = next(shard for shard in range(4) if keys.tokens(shard) in recorder.seen)
    ids = [fields[k.REQUEST] for fields in recorder.seen[keys.prompts]]
    offsets = wire.encode_offsets([DeliveredSequence(), DeliveredSequence()])
    made = {
        keys.cancels: [
            {k.REQUEST: each, k.SEQUENCE: b"-1", k.REASON: b"1", k.SENT_NS: b"5"} for each in (*ids, bytes(16))
        ],
        keys.attach(shard): [{k.REQUEST: each, k.ROUTE: route, k.OFFSETS: offsets} for each in (*ids, bytes(16))],
        keys.dead: [{k.STREAM: b"x", k.WHY: b"y"}],
    }
    names = {
        "prompts": keys.prompts,
        "requests": keys.requests,
        "cancels": keys.cancels,
        "steps": keys.steps("worker"),
        "results": keys.results("worker"),
        "tokens": keys.tokens(shard),
        "attach": keys.attach(shard),
        "text": keys.text(route),
        "dead": keys.dead,
    }
    return {name: (key, made.get(key) or list(recorder.seen[key])) for name, key in names.items()}


@pytest.mark.parametrize("stream", STREAMS)
def test_whatever_stands_in_a_stream_the_next_request_is_served(
    pipeline: FiredAt, valid: dict[str, tuple[bytes, list[dict[bytes, bytes]]]], stream: str
) -> None:
    key, entries = valid[stream]
    dice = random.Random(f"{SEED} {stream}")
    for number in range(ROUNDS):
        entry = {random_bytes(dice): random_bytes(dice)}
        if dice.random() < 0.9:
            entry = mutated_fields(dice, dice.choice(entries))
        if k.REQUEST in entry and dice.random() < 0.3:
            entry[k.REQUEST] = dice.randbytes(16)  # of nobody
        pipeline.put(key, entry)
        if number % ENTRIES_A_VOLLEY == ENTRIES_A_VOLLEY - 1:
            pipeline.check_alive(number)
    pipeline.check_alive()


@pytest.mark.parametrize("stream", [name for name in STREAMS if name != "dead"])
def test_what_cannot_be_read_is_counted(
    pipeline: FiredAt, valid: dict[str, tuple[bytes, list[dict[bytes, bytes]]]], stream: str
) -> None:
    key, _ = valid[stream]
    before = pipeline.dead_letters()
    pipeline.put(key, {b"zz": b"zz"})
    wait_until(lambda: pipeline.dead_letters() > before)
    pipeline.check_alive()
