"""docs/api.md lists exactly the routes, fields, headers and errors that there are."""

import re
from collections.abc import Collection
from pathlib import Path

from contract.domain.errors import ERROR_KINDS, ErrorCode
from contract.domain.params import PARAMETERS
from gateway_svc import http, http_calls, http_replies, intake
from gateway_svc.core import apis, auth, event_ids, idempotency
from gateway_svc.core.anthropic import fields as messages
from gateway_svc.core.openai import CHAT_FIELDS, COMPLETION_FIELDS
from gateway_svc.core.pooled.fields import (
    EMBEDDING_FIELDS,
    OTHERS_OF_EMBEDDINGS,
    OTHERS_OF_RERANKS,
    OTHERS_OF_SCORES,
    RERANK_FIELDS,
    SCORE_FIELDS,
)
from gateway_svc.core.responses import fields as responses
from gateway_svc.core.unsupported import HARMLESS, MISPLACED, NEUTRAL, Unsupported
from gateway_svc.core.vocabulary import DETOKENIZE_FIELDS, TOKENIZE_FIELDS

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
BOTH = "both"


def section(title: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    mark = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert mark, title
    rest = PAGE[mark.end() :]
    return re.split(rf"^#{{1,{len(mark[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [cells for cells in found[1:] if not set(cells[0]) <= set("-")]


def names(cell: str) -> list[str]:
    found: list[str] = re.findall(r"`([^`]+)`", cell)
    return found


def listed(title: str) -> list[str]:
    """The names in the first cells of a section's table, each once."""
    found = [name for cells in rows(title) for name in names(cells[0])]
    assert len(found) == len(set(found))
    return found


def by_call(title: str) -> dict[str, set[str]]:
    """The same, by the call that the second cell says."""
    found: dict[str, set[str]] = {"completion": set(), "chat": set(), BOTH: set()}
    for cells in rows(title):
        found[cells[1]] |= set(names(cells[0]))
    return found


def test_the_routes_are_those_of_the_application() -> None:
    served = {f"{method} {path.replace(':path', '')}" for path, _, methods in http.ROUTES for method in methods}
    assert set(listed("Routes")) == served


def test_the_fields_of_texts_and_tokens_are_those_of_their_bodies() -> None:
    found = {call: set[str]() for call in (BOTH, "tokenize", "detokenize")}
    for cells in rows("Text and tokens"):
        found[cells[1]] |= set(names(cells[0]))
    assert found["tokenize"] | found[BOTH] == TOKENIZE_FIELDS
    assert found["detokenize"] | found[BOTH] == DETOKENIZE_FIELDS


def test_the_fields_that_are_done_are_those_of_the_bodies() -> None:
    found, parameters = by_call("Fields that are done"), by_call("Sampling parameters")
    assert found[BOTH] | parameters[BOTH] == COMPLETION_FIELDS & CHAT_FIELDS
    assert parameters[BOTH] == set(PARAMETERS)
    assert found["completion"] == COMPLETION_FIELDS - CHAT_FIELDS
    assert found["chat"] == CHAT_FIELDS - COMPLETION_FIELDS


def test_the_fields_that_are_refused_are_those_of_the_list_with_what_they_may_say() -> None:
    told = {name: names(cells[1]) for cells in rows("Fields that are refused") for name in names(cells[0])}
    assert set(told) == set(NEUTRAL)
    for name, values in NEUTRAL.items():
        shown = dict.fromkeys(http_replies.encode(value).decode().removesuffix(".0") for value in values)
        assert told[name] == list(shown), name


def test_the_fields_with_another_name_are_those_of_the_list() -> None:
    found = by_call("Fields with another name")
    assert found[BOTH] == set(MISPLACED[""])
    assert [found[call] for call in ("completion", "chat")] == [set(MISPLACED[call]) for call in ("completion", "chat")]


def test_the_fields_that_change_nothing_are_those_of_the_list() -> None:
    assert set(listed("Fields that change nothing")) == HARMLESS


def test_the_fields_of_a_response_are_those_of_its_body() -> None:
    check_fields_of("a response", responses.RESPONSE_FIELDS, responses.UNSUPPORTED)


def test_the_fields_of_a_message_are_those_of_its_body() -> None:
    check_fields_of("a message", messages.MESSAGE_FIELDS, messages.UNSUPPORTED)


def test_the_fields_of_vectors_are_those_of_their_bodies() -> None:
    found = {call: set[str]() for call in ("all", "embedding", "score", "rerank")}
    table = [cells for cells in rows("Fields of vectors") if len(cells) == 3]
    for cells in table:
        found[cells[1]] |= set(names(cells[0]))
    for call, fields in (("embedding", EMBEDDING_FIELDS), ("score", SCORE_FIELDS), ("rerank", RERANK_FIELDS)):
        assert found["all"] | found[call] == fields
    refused = {name: names(cells[1]) for cells in rows("Fields of vectors")[len(table) :] for name in names(cells[0])}
    refused.pop("field", None)
    for others in (OTHERS_OF_EMBEDDINGS, OTHERS_OF_SCORES, OTHERS_OF_RERANKS):
        assert refused == {
            name: [http_replies.encode(value).decode() for value in values] for name, values in others.neutral.items()
        }


def check_fields_of(call: str, done: Collection[str], unsupported: Unsupported) -> None:
    """A table each of what is done, refused, elsewhere and harmless, beside what is so everywhere."""
    without = {name for name in PARAMETERS if name not in done}
    told = set(listed(f"Fields of {call}"))
    assert told - set(PARAMETERS) == set(done) - set(PARAMETERS)
    assert told <= set(done)
    assert f"All [sampling parameters](#sampling-parameters) but {_named(without)}" in section(f"Fields of {call}")
    refused = {name: names(cells[1]) for cells in rows(f"Refused of {call}") for name in names(cells[0])}
    assert refused == {
        name: [http_replies.encode(value).decode() for value in values] for name, values in unsupported.neutral.items()
    }
    assert set(listed(f"Elsewhere in {call}")) == set(unsupported.misplaced)
    harmless = section(f"Elsewhere in {call}").partition("Nothing changes by")[2]
    assert set(names(harmless)) == set(unsupported.harmless)


def _named(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def test_the_headers_are_those_that_are_read_and_told() -> None:
    read = {
        *(intake.TIMEOUT_HEADER, intake.RESUMABLE_HEADER, intake.EVENT_IDS_HEADER, intake.CLIENT_ID_HEADER),
        *(idempotency.IDEMPOTENCY_KEY, event_ids.LAST_EVENT_ID, auth.TENANT_HEADER),
        *("authorization", "content-type", "traceparent", auth.API_KEY_HEADER, "anthropic-version", "anthropic-beta"),
    }
    assert {name.lower() for name in listed("Headers of requests")} == read
    told = {
        *(http_calls.REQUEST_ID_HEADER.decode(), intake.CLIENT_ID_HEADER),
        http_replies.IGNORED_FIELDS_HEADER.decode(),
        apis.MESSAGES.id_header.decode(),
        *("server-timing", "x-should-retry", "retry-after", "www-authenticate", "allow"),
    }
    assert {name.lower() for name in listed("Headers of replies")} == told


def test_the_errors_are_those_that_there_are_with_their_statuses() -> None:
    told = {name: (cells[1], cells[2]) for cells in rows("Errors") for name in names(cells[0])}
    kinds = {code.name.lower(): ERROR_KINDS[code] for code in ErrorCode if code is not ErrorCode.UNSPECIFIED}
    assert told == {name: (str(kind.http_status), kind.fault.value) for name, kind in kinds.items()}
