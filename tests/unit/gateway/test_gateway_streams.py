"""Rows are taken once, in order, whatever comes twice, late or from another history."""

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.domain import chain
from contract.domain.finish import FinishReason
from contract.domain.rows import TextRow, TokenLogprob
from gateway_svc.core.backlog import LOGPROB_BYTES, Backlog
from gateway_svc.core.streams import ClientStream, Refusal, merge, split

REQUEST = b"r" * 16


def row_between(tokens: list[int], texts: list[str], start: int, stop: int, *, ends: bool = False) -> TextRow:
    """The row of a history that holds its tokens `start` to `stop`."""
    return TextRow(
        request_id=REQUEST,
        sequence=0,
        token_offset=start,
        text_offset=len("".join(texts[:start])),
        chain=chain.extend(chain.CHAIN_START, tokens[:start]),
        token_ids=tuple(tokens[start:stop]),
        text="".join(texts[start:stop]),
        logprobs=tuple(TokenLogprob(token_id, -1.0) for token_id in tokens[start:stop]),
        finish=FinishReason.STOP if ends else FinishReason.UNSPECIFIED,
    )


histories = st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), min_size=1, max_size=30)


@settings(max_examples=200)
@given(histories, st.integers(0, 2**32))
def test_any_mixture_of_rows_gives_the_history_once(history: list[tuple[int, str]], seed: int) -> None:
    rng = random.Random(seed)
    tokens, texts = [token for token, _ in history], [text for _, text in history]
    stream = ClientStream(1)
    got_tokens: list[int] = []
    got_text = ""
    while not stream.ended:
        # Anything that some detokenizer could send: old rows, rows too far ahead, and the answer to a re-attachment.
        start = rng.choice([rng.randrange(len(tokens) + 1), stream.sequences[0].num_tokens])
        stop = rng.randint(start, len(tokens))
        row = row_between(tokens, texts, start, stop, ends=stop == len(tokens) and rng.random() < 0.5)
        before = (stream.sequences[0].num_tokens, stream.sequences[0].num_chars)
        taken = stream.accept(row)
        if isinstance(taken, Refusal):
            assert (stream.sequences[0].num_tokens, stream.sequences[0].num_chars) == before
            continue
        assert (taken.token_offset, taken.text_offset) == before
        assert [entry.token_id for entry in taken.logprobs] == list(taken.token_ids)
        got_tokens += taken.token_ids
        got_text += taken.text
    assert got_tokens == tokens
    assert got_text == "".join(texts)
    assert stream.accept(row_between(tokens, texts, 0, len(tokens), ends=True)) is Refusal.KNOWN


def test_a_gap_asks_for_reattachment() -> None:
    stream = ClientStream(1)
    assert stream.accept(row_between([1, 2, 3], ["a", "b", "c"], 1, 2)) is Refusal.BEHIND
    assert stream.sequences[0].num_tokens == 0


def test_another_history_is_never_spliced() -> None:
    stream = ClientStream(1)
    mine, other = [1, 2, 3], [1, 9, 3]
    texts = ["a", "b", "c"]
    assert not isinstance(stream.accept(row_between(mine, texts, 0, 2)), Refusal)
    assert stream.accept(row_between(other, texts, 2, 3)) is Refusal.BEHIND
    assert stream.accept(row_between(other, texts, 0, 3)) is Refusal.BEHIND
    # An end before what was delivered would take something back.
    assert stream.accept(row_between(mine, texts, 0, 1, ends=True)) is Refusal.BEHIND


def test_the_longer_answer_to_a_reattachment_is_trimmed() -> None:
    stream = ClientStream(1)
    tokens, texts = [1, 2, 3], ["ab", "", "cd"]
    stream.accept(row_between(tokens, texts, 0, 1))
    taken = stream.accept(row_between(tokens, texts, 0, 3, ends=True))
    assert isinstance(taken, TextRow)
    assert (taken.token_ids, taken.text, taken.finish) == ((2, 3), "cd", FinishReason.STOP)
    assert stream.ended


def test_text_that_was_held_back_comes_with_the_end() -> None:
    stream = ClientStream(1)
    stream.accept(TextRow(REQUEST, 0, 0, 0, chain.CHAIN_START, (5,), ""))
    known = chain.extend(chain.CHAIN_START, [5])
    taken = stream.accept(TextRow(REQUEST, 0, 1, 0, known, (), "late", finish=FinishReason.LENGTH))
    assert isinstance(taken, TextRow)
    assert taken.text == "late"


def test_samples_are_kept_apart_and_strangers_ignored() -> None:
    stream = ClientStream(2)
    row = TextRow(REQUEST, 1, 0, 0, chain.CHAIN_START, (5,), "x", finish=FinishReason.STOP)
    assert stream.accept(row) is row
    assert not stream.ended
    assert stream.accept(TextRow(REQUEST, 2, 0, 0, chain.CHAIN_START, (5,), "x")) is Refusal.KNOWN
    assert stream.accept(TextRow(REQUEST, 0, 0, 0, chain.CHAIN_START, (), "")) is Refusal.KNOWN


def test_a_backlog_merges_by_choice_and_says_when_it_is_full() -> None:
    tokens, texts = [1, 2, 3], ["a", "b", "c"]
    backlog = Backlog(1000)
    assert not backlog
    for choice in (4, 2):
        for start in range(3):
            backlog.add(choice, row_between(tokens, texts, start, start + 1, ends=start == 2))
    assert backlog.is_full
    whole = row_between(tokens, texts, 0, 3, ends=True)
    assert backlog.drain() == [(4, whole), (2, whole)]
    assert not backlog
    assert not backlog.is_full
    assert merge([whole]) is whole


def test_a_backlog_counts_logprobs_and_their_alternatives() -> None:
    """A row of one token may bring twenty alternatives, which are most of what it takes."""
    row = row_between([1], ["a"], 0, 1)
    sizes = []
    for logprobs in ((), (TokenLogprob(1, -0.5),), (TokenLogprob(1, -0.5, ((1, -0.5),) * 20),)):
        backlog = Backlog(10_000)
        backlog.add(0, replace(row, logprobs=logprobs))
        sizes.append(backlog.num_bytes)
    without, *others = sizes
    assert [size - without for size in others] == [LOGPROB_BYTES, 21 * LOGPROB_BYTES]


def test_logprobs_fill_a_backlog() -> None:
    row = replace(row_between([1], ["a"], 0, 1), logprobs=(TokenLogprob(1, -0.5, ((1, -0.5),) * 20),))
    backlog = Backlog(2 * 21 * LOGPROB_BYTES)
    backlog.add(0, row)
    assert not backlog.is_full
    backlog.add(1, row)
    assert backlog.is_full


@given(histories, st.integers(1, 5), st.integers(1, 5))
def test_split_rows_merge_to_what_they_were(history: list[tuple[int, str]], max_tokens: int, max_chars: int) -> None:
    tokens, texts = [token for token, _ in history], [text for _, text in history]
    whole = row_between(tokens, texts, 0, len(tokens), ends=True)
    parts = split(whole, max_tokens, max_chars)
    assert all(len(part.token_ids) <= max_tokens and len(part.text) <= max_chars for part in parts)
    assert merge(parts) == whole
    stream = ClientStream(1)
    assert [stream.accept(part) for part in parts] == parts
    assert stream.ended
