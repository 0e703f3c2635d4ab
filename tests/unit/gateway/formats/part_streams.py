"""Outputs of one request as rows, and as the events that a client has of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from contract.domain import chain
from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TextRow, TokenLogprob
from gateway_svc.call import ClientCall, Served
from gateway_svc.core.api import Api, EventFormat
from gateway_svc.core.event_ids import parse_event_id
from gateway_svc.core.formats.reading import OutputReading
from gateway_svc.core.replies import ReplyHead
from gateway_svc.core.streams import ClientStream, DeliveredSequence, Refusal

ID = bytes(range(16))
CLOSING_ID = 900
USAGE = Usage(num_prompt_tokens=7, num_output_tokens=9, num_cached_tokens=4)


def reading(tool_format: str = "hermes", **more: Any) -> OutputReading:
    return OutputReading(tool_format, "think", hidden=("<|im_end|>",), closing_token_id=CLOSING_ID, **more)


def head(api: Api, how: OutputReading, **more: Any) -> ReplyHead:
    given = {"call_id": api.form.id_prefix + ID.hex(), "model": "m", "created_s": 1, "num_choices": 1} | more
    return ReplyHead(form=api.form, reading=how, request_id=ID, **given)


def as_rows(parts: Sequence[str], finish: FinishReason = FinishReason.STOP, stop: str | None = None) -> list[TextRow]:
    """A row of one token for each part of a text; with the last one it ends."""
    rows, known, num_chars = [], chain.CHAIN_START, 0
    for index, part in enumerate(parts):
        logprobs = (TokenLogprob(index, -1.0, token_bytes=part.encode(), text_offset=num_chars),)
        row = TextRow(ID, 0, index, num_chars, known, (index,), part, logprobs)
        known, num_chars = chain.extend(known, (index,)), num_chars + len(part)
        rows.append(row)
    rows[-1] = replace(rows[-1], finish=finish, stop_reason=stop, usage=USAGE)
    return rows


@dataclass
class Client:
    """A client of one gateway: what it came with, and what it is told."""

    events: EventFormat
    served: Served
    told: bytes = b""

    @classmethod
    def after(cls, api: Api, told: ReplyHead, last_id: str) -> "Client":
        """One that comes back with the id of its last event; empty: one that comes first."""
        have = [DeliveredSequence()]
        if last_id:
            have = parse_event_id(last_id, ID, 1, is_numbered=True)
        events = api.events(told, ID, have, with_ids=True)
        events.learn([0], USAGE.num_prompt_tokens)
        sink = SimpleNamespace(recall=events.recall)
        call = cast(ClientCall, SimpleNamespace(form=SimpleNamespace(request_ids=[ID]), sink=sink))
        reader = ClientStream(1) if last_id else None
        return cls(events, Served(call, 0, ClientStream(1, have), b"", reader))

    def take(self, rows: Iterable[TextRow]) -> "Client":
        """Hand rows over as `delivery.Delivery` does, up to the end if that is among them."""
        for row in rows:
            taken = self.served.accept(row)
            if not isinstance(taken, Refusal):
                self.told += self.events.chunk(0, taken, self.served.stream.sequences[0].chain)
            else:
                assert taken is Refusal.KNOWN
        if self.served.stream.ended:
            self.told += self.events.end([USAGE])
        return self


def events_of(told: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """The id, the type and the fields of each event."""
    found = []
    for block in told.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        fields = json.loads(lines["data"])
        assert lines["event"] == fields["type"]
        found.append((lines.get("id", ""), lines["event"], fields))
    return found


def joined(events: Iterable[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events without their ids, with growth of one part as one."""
    found: list[dict[str, Any]] = []
    for _, _, fields in events:
        last = found[-1] if found else {}
        if _grows(last, fields):
            found[-1] = _grown(last, fields)
        else:
            found.append(fields)
    return found


def _grows(last: dict[str, Any], more: dict[str, Any]) -> bool:
    if last.get("type") != more["type"] or not more["type"].endswith("delta"):
        return False
    return isinstance(more["delta"], str) or last["delta"].get("type") == more["delta"].get("type")


def _grown(last: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    if isinstance(more["delta"], str):
        logprobs = {"logprobs": last["logprobs"] + more["logprobs"]} if "logprobs" in more else {}
        return {**more, "delta": last["delta"] + more["delta"], **logprobs}
    delta = {
        key: value if key == "type" else last["delta"].get(key, "") + value for key, value in more["delta"].items()
    }
    return {**more, "delta": delta}
