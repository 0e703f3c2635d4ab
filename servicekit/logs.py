"""Structured logs on standard error: JSON lines, or readable ones on a terminal.

`structlog.get_logger()` and the standard library's loggers end in the same place. What is bound with
`structlog.contextvars.bound_contextvars(request_id=…)` appears in every line of that task or thread.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import Processor

# Libraries that announce every connection or call.
_TALKATIVE = ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "grpc")


def is_debugging() -> bool:
    """Return whether lines of level debug are written. Whoever has one for each request asks first: to find out by
    making it takes as long as some of the work.
    """
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def configure(
    level: str, log_format: Literal["auto", "json", "console"], *, stream: TextIO | None = None, **bound: str
) -> None:
    """Sends all logs of this process, from `level` on, to `stream` (standard error); `bound` is on every JSON line."""
    stream = stream or sys.stderr
    readable = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        # Who reads along knows which process it is.
        _with({} if readable else bound),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if readable else "iso", utc=not readable),
        structlog.stdlib.ExtraAdder(),
    ]
    if readable:
        colors = stream.isatty() or bool(os.environ.get("FORCE_COLOR"))
        last: list[Processor] = [_console(colors=colors)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared[:4],
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _with(bound: dict[str, str]) -> Processor:
    # Context variables do not reach threads that were started without a copy of the context.
    def add(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in bound.items():
            event.setdefault(key, value)
        return event

    return add


def _console(*, colors: bool) -> Processor:
    # A plain traceback: one with local variables would show what clients sent.
    return structlog.dev.ConsoleRenderer(
        colors=colors, pad_event_to=0, pad_level=False, exception_formatter=structlog.dev.plain_traceback
    )


def _json(event: Any, **_options: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
