"""A small HTTP server of OpenAI's shape that is not Penstock's."""

import json
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


@dataclass(frozen=True)
class Answer:
    """An answer to a POST."""

    parts: Iterable[bytes]  # of the body, each sent by itself
    status: int = 200
    type: str = "text/event-stream"
    length: int | None = None  # of the body, as is claimed


@dataclass
class OpenAILike:
    """The answers of the server, and the requests that it got."""

    answers: list[Answer]  # to the POSTs, one after the other
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
    models_status: int = 200
    tls: ssl.SSLContext | None = None
    url: str = ""
    left: threading.Event = field(default_factory=threading.Event)  # a client went before its answer ended
    asked: list[tuple[str, Mapping[str, str], Any]] = field(default_factory=list)  # path, headers, body

    def bodies(self) -> list[Any]:
        """Of the POSTs."""
        return [body for _, _, body in self.asked if body is not None]

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    def keys(self) -> list[str | None]:
        return [headers.get("Authorization") for _, headers, _ in self.asked]

    @contextmanager
    def serve(self) -> Iterator["OpenAILike"]:
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told.asked.append((self.path, self.headers, None))
                self._answer(Answer([json.dumps(told.models).encode()], told.models_status, "application/json"))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.asked.append((self.path, self.headers, body))
                self._answer(told.answers.pop(0))

            def _answer(self, answer: Answer) -> None:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.type)
                if answer.length is not None:
                    self.send_header("Content-Length", str(answer.length))
                self.end_headers()  # HTTP/1.0: the body ends with the connection, too early if it was to be longer
                try:
                    for part in answer.parts:
                        self.wfile.write(part)
                except ConnectionError:
                    told.left.set()

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if self.tls is not None:
            server.socket = self.tls.wrap_socket(server.socket, server_side=True)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
