"""Event streams of OpenAI's API: data however it is cut, what an event tells, and errors in any server's shape."""

from typing import Any

import pytest

from penstock.openai_stream import DataReader, decode_event, error_text

STREAM = (
    b": a comment\n\nevent: message\nid: 1\ndata: one\n\n"
    b"data:two\r\n\r\n"  # no space, other line ends
    b"data: three\ndata: lines\n\n"
    b"data:\n\nretry: 5\n\n\n"  # no data
    b"data: not ended"
)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, len(STREAM)])
def test_data_is_read_however_its_bytes_are_cut(cut: int) -> None:
    reader = DataReader()
    found = [data for at in range(0, len(STREAM), cut) for data in reader.feed(STREAM[at : at + cut])]
    assert found == [b"one", b"two", b"three\nlines"]
    assert reader.feed(b"\n\n") == [b"not ended"]


@pytest.mark.parametrize(
    ("choice", "content", "reasoning"),
    [
        (b'{"text":"a"}', "a", ""),
        (b'{"delta":{"role":"assistant","content":""}}', "", ""),
        (b'{"delta":{"content":"a","reasoning":null}}', "a", ""),
        (b'{"delta":{"content":null,"refusal":"no"}}', "no", ""),
        (b'{"delta":{"reasoning":"hm"}}', "", "hm"),
        (b'{"delta":{"reasoning_content":"hm"}}', "", "hm"),
        (b'{"delta":{"content":[{"type":"text"}]}}', "", ""),
        (b'{"delta":null,"finish_reason":"stop"}', "", ""),
    ],
)
def test_an_events_text_and_thoughts_are_found_by_any_name(choice: bytes, content: str, reasoning: str) -> None:
    event = decode_event(b'{"id":"x","choices":[' + choice + b"]}")
    assert event.choices is not None
    assert (event.choices[0].content, event.choices[0].reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"error": {"message": "too\n long", "type": "invalid_request_error"}}, "too long"),
        ({"message": "no room", "type": "x"}, "no room"),
        ({"error": "model is loading"}, "model is loading"),
        ({"object": "error", "message": "bad"}, "bad"),
        ({"detail": "Not Found"}, "Not Found"),
        ({"detail": [{"loc": ["body"]}]}, "[{'loc': ['body']}]"),
        ({"error": {}}, "{'error': {}}"),
        ("text", "text"),
        (None, "None"),
    ],
)
def test_an_errors_message_is_one_line(found: Any, text: str) -> None:
    assert error_text(found) == text
