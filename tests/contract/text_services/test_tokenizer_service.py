"""The tokenizer on a bus: every prompt ends as tokens or as an error, whatever it holds and whoever dies."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from text_pipeline import PATIENCE_S, SCHEDULER, Pool, eventually, running

from contract.domain.errors import ErrorCode
from contract.domain.finish import FinishReason, RequestError
from contract.domain.request import Prompt
from contract.v1 import requests_pb2
from detokenizer_svc import wire as detokenizer_wire
from servicekit.bus import keys as k
from servicekit.bus.calls import Acknowledge, Append, Claim, Hello, Leave, Length, ReadGroup, RequestState, SessionKind
from tokenizer_svc import service
from tokenizer_svc.jobs import Outcome


def _tokens(pool: Pool, request_id: bytes) -> requests_pb2.TokenizedPrompt:
    eventually(lambda: pool.fetch(request_id).state is RequestState.READY)
    return requests_pb2.TokenizedPrompt.FromString(pool.fetch(request_id).meta)


def _claimed_ids(pool: Pool) -> list[int]:
    """The token ids of the one request that waits, as its scheduler gets them."""
    (request,) = pool.connection.call(Claim(SCHEDULER, 1, 0)) or ()
    ids: list[int] = np.frombuffer(request.token_ids, "<u4").tolist()
    return ids


def _errors(pool: Pool, request_id: bytes) -> list[RequestError]:
    """The errors that end a rejected request, one for each sequence."""
    eventually(lambda: pool.fetch(request_id).state is RequestState.RUNNING)
    stream = pool.bus.keys.tokens(pool.fetch(request_id).shard or 0)
    opening, batch = pool.entries(stream)[-2:]
    assert opening.fields[k.REQUEST] == request_id
    rows = detokenizer_wire.decode_tokens(batch.fields[k.PAYLOAD])[1]
    assert set(rows.request_ids) == {request_id}
    assert rows.sequences.tolist() == list(range(len(rows)))
    assert set(rows.finishes.tolist()) == {FinishReason.ERROR}
    return [rows.errors[row] for row in range(len(rows))]


def test_a_text_becomes_tokens_and_waits_for_a_scheduler(pool: Pool) -> None:
    with running(pool.tokenizer_service()):
        request_id = pool.submit(1, Prompt(text="the old mill"), max_tokens=None)
        tokens = _tokens(pool, request_id)
    ids = pool.ids("the old mill")
    assert np.frombuffer(tokens.eos_token_ids, "<u4").tolist() == [0]
    assert (tokens.num_tokens, tokens.max_tokens) == (len(ids), 200_000 - len(ids))
    hints = pool.entries(pool.bus.keys.requests)
    assert [hint.fields[k.REQUEST] for hint in hints] == [request_id]
    assert pool.connection.call(Length(pool.bus.keys.prompts)) == 0
    assert _claimed_ids(pool) == ids


def test_prompts_that_come_to_a_listening_tokenizer_wait_for_nothing_else(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenizer_svc.hints.READ_BLOCK_MS", 4 * round(PATIENCE_S * 1000))
    with running(pool.tokenizer_service(stay_awake_ms=1)):
        for number in (1, 2):
            _tokens(pool, pool.submit(number, Prompt(text="the old mill")))
        pool.connection.call(Append(pool.bus.keys.bell, {k.SENT_NS: b"1"}))  # ends the last wait


def test_a_long_prompt_that_is_done_waits_for_no_other(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BUSY_WAIT_S", 4 * PATIENCE_S)
    with running(pool.tokenizer_service(long_prompt_chars=4)):
        _tokens(pool, pool.submit(1, Prompt(text="the old mill")))


def test_a_hint_that_brings_no_request_along_is_looked_up(pool: Pool) -> None:
    request_id = pool.submit(1, Prompt(text="the old mill"))
    prompts = pool.bus.keys.prompts
    (hint,) = pool.connection.call(ReadGroup(prompts, k.TOKENIZERS, b"other", 10))
    bare = {k.REQUEST: request_id, k.SENT_NS: b"1"}
    pool.connection.execute([Acknowledge(prompts, k.TOKENIZERS, hint.entry_id), Append(prompts, bare)])
    with running(pool.tokenizer_service()):
        tokens = _tokens(pool, request_id)
    assert tokens.num_tokens == len(pool.ids("the old mill"))
    assert _claimed_ids(pool) == pool.ids("the old mill")


def test_a_wrong_prompt_ends_every_sequence_with_the_callers_error(pool: Pool) -> None:
    with running(pool.tokenizer_service()):
        request_id = pool.submit(1, Prompt(token_ids=(5, 4_000)), n=3)
        errors = _errors(pool, request_id)
    assert [error.code for error in errors] == [ErrorCode.INVALID_ARGUMENT] * 3
    assert "4000" in errors[0].message
    assert errors[0].param == "prompt"


def test_a_prompt_beyond_its_deadline_is_not_tokenized(pool: Pool) -> None:
    with running(pool.tokenizer_service()):
        request_id = pool.submit(1, Prompt(text="the"), deadline_ns=time.time_ns() - 1)
        (error,) = _errors(pool, request_id)
    assert error.code is ErrorCode.DEADLINE_EXCEEDED


def test_long_prompts_go_to_threads_and_all_prompts_come_through(pool: Pool) -> None:
    service = pool.tokenizer_service(long_prompt_chars=1000)
    with running(service):
        long = [pool.submit(n, Prompt(text="the old mill " * 8_000)) for n in range(1, 4)]
        short = [pool.submit(n, Prompt(text=f"brook {n}")) for n in range(10, 20)]
        for request_id in (*short, *long):
            assert _tokens(pool, request_id).num_tokens
    assert service.status().figures["tokenizer_prompts_total"] == 13


def test_what_cannot_be_read_is_kept_for_the_operator_and_the_rest_goes_on(pool: Pool) -> None:
    with running(pool.tokenizer_service()):
        pool.connection.call(Append(pool.bus.keys.prompts, {b"what": b"?"}))
        damaged = pool.submit_raw(b"d" * 16, b"\xff\xff", b"")
        good = pool.submit(1, Prompt(text="the"))
        assert _tokens(pool, good).num_tokens
        (error,) = _errors(pool, damaged)
        assert error.code is ErrorCode.INTERNAL
        letters = eventually(lambda: len(found := pool.entries(pool.bus.keys.dead)) == 2 and found)
        assert {letter.fields[k.STREAM] for letter in letters} == {b"prompts"}
        assert letters[0].fields[b"what"] == b"?"
        assert letters[1].fields[k.REQUEST] == damaged
        eventually(lambda: pool.connection.call(Length(pool.bus.keys.prompts)) == 0)


def test_json_that_is_none_is_the_callers_error(pool: Pool) -> None:
    message = requests_pb2.GenerateRequest()
    message.messages.messages.add(role="user", content="hi", extra_json="{")
    header = b"\x0a\x10" + b"j" * 16
    with running(pool.tokenizer_service()):
        (error,) = _errors(pool, pool.submit_raw(b"j" * 16, header, message.SerializeToString()))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert "JSON" in error.message


def test_a_defect_in_tokenizing_ends_the_request_and_not_the_service(pool: Pool) -> None:
    service = pool.tokenizer_service()

    class PanicException(BaseException):
        """As the tokenizer library raises it."""

    def panic(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    real, service.prompts.encode = service.prompts.encode, panic  # type: ignore[method-assign, assignment]
    with running(service):
        (error,) = _errors(pool, pool.submit(1, Prompt(text="the")))
        assert error.code is ErrorCode.INTERNAL
        service.prompts.encode = real  # type: ignore[method-assign]
        assert _tokens(pool, pool.submit(2, Prompt(text="the"))).num_tokens


def test_hints_of_a_dead_tokenizer_are_claimed(pool: Pool) -> None:
    request_id = pool.submit(1, Prompt(text="the"))
    taken = pool.connection.call(ReadGroup(pool.bus.keys.prompts, k.TOKENIZERS, b"dead", 10))
    assert len(taken) == 1
    with running(pool.tokenizer_service(reclaim_after_s=0.1)):
        assert _tokens(pool, request_id).num_tokens


def test_hints_of_a_dead_tokenizer_go_to_a_living_one_as_soon_as_its_lease_is_over(pool: Pool) -> None:
    dead = b"D" * 16
    pool.connection.call(Hello(dead, SessionKind.TOKENIZER, "dead", "", 60_000))
    request_id = pool.submit(1, Prompt(text="the"))
    pool.connection.call(ReadGroup(pool.bus.keys.prompts, k.TOKENIZERS, b"dead", 10))
    with running(pool.tokenizer_service(reclaim_after_s=3600)):
        assert _tokens(pool, pool.submit(2, Prompt(text="the"))).num_tokens
        assert not pool.fetch(request_id).meta
        pool.connection.call(Leave(dead))
        assert _tokens(pool, request_id).num_tokens


def test_a_tokenizer_that_was_restarted_finishes_what_it_had_been_given(pool: Pool) -> None:
    request_id = pool.submit(1, Prompt(text="the"))
    pool.connection.call(ReadGroup(pool.bus.keys.prompts, k.TOKENIZERS, b"phoenix", 10))
    with running(pool.tokenizer_service(name="phoenix", reclaim_after_s=3600)):
        assert _tokens(pool, request_id).num_tokens


def test_a_hint_that_leads_nowhere_is_deleted(pool: Pool) -> None:
    with running(pool.tokenizer_service()):
        pool.connection.call(Append(pool.bus.keys.prompts, {k.REQUEST: b"?" * 16}))
        eventually(lambda: pool.connection.call(Length(pool.bus.keys.prompts)) == 0)


def test_a_restarted_server_is_waited_for(pool: Pool) -> None:
    with running(pool.tokenizer_service(reclaim_after_s=0.2)):
        assert _tokens(pool, pool.submit(1, Prompt(text="the"))).num_tokens
        pool.restart()
        assert _tokens(pool, pool.submit(2, Prompt(text="the"))).num_tokens


def test_draining_finishes_what_was_read(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    service = pool.tokenizer_service(long_prompt_chars=4)
    may_end, make = threading.Event(), service._outcomes.of

    def make_later(*given: Any) -> Outcome:
        assert may_end.wait(PATIENCE_S)
        return make(*given)

    monkeypatch.setattr(service._outcomes, "of", make_later)
    with running(service) as stop:
        request_id = pool.submit(1, Prompt(text="the old mill"))
        eventually(lambda: service.status().figures["tokenizer_long_prompts"])
        stop.drain()
        eventually(lambda: not service.is_ready())
        may_end.set()
        assert _tokens(pool, request_id).num_tokens
        assert not service.is_ready()
