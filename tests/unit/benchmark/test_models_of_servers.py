"""The model that `penstock bench serve` measures, and the checkpoint whose tokenizer it takes."""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from penstock.benchmark.serve import _look


@contextmanager
def server(*replies: list[dict[str, object]]) -> Iterator[str]:
    """A server that tells these models, one reply after the other, and then the last again."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": left.pop(0) if len(left) > 1 else left[0]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("replies", "found"),
    [
        ([[{"id": "m", "root": "/d"}]], ("m", "/d")),
        ([[{"id": "m"}]], ("m", "m")),
        ([[{"id": "m", "root": None}], [{"id": "m", "root": None}], [{"id": "m", "root": "/d"}]], ("m", "/d")),
    ],
    ids=["told", "not told", "told later"],
)
def test_the_tokenizer_is_that_of_the_checkpoint_that_the_server_tells(
    replies: list[list[dict[str, object]]], found: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.benchmark.serve._ROOT_WAIT_S", 300.0)
    with server(*replies) as url:
        assert _look(argparse.Namespace(base_url=url, api_key=None, model=None, tokenizer="")) == found
