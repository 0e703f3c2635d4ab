"""The way in which the outputs of one call are read: kept with its requests, so that any gateway tells the same."""

from dataclasses import dataclass
from functools import lru_cache

from gateway_svc.core.formats.channel_reader import ChannelReader
from gateway_svc.core.formats.output_format import OutputFormat
from gateway_svc.core.formats.reader import Reader
from gateway_svc.core.formats.registry import REASONING_FORMATS, TOOL_FORMATS
from gateway_svc.core.formats.teller import Teller


@dataclass(frozen=True, slots=True)
class OutputReading:
    """All that thoughts and calls are found by, beside the text itself."""

    tool_format: str = ""  # empty: calls are content
    reasoning_format: str = ""  # empty: thoughts are content
    begins_thinking: bool = False  # the prompt ends inside of a thought
    without_reasoning: bool = False  # thoughts are not told
    hidden: tuple[str, ...] = ()  # special tokens that are not told
    closing_token_id: int | None = None  # with which thoughts end; None: their tokens are not counted
    texts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # functions and their parameters that are texts

    @property
    def format(self) -> OutputFormat:
        """The format of an output."""
        return _format_of(self)

    def reader(self) -> Teller:
        """A reader of an output that begins."""
        return reader_of(self.format)


def reader_of(form: OutputFormat) -> Teller:
    """A reader of an output in this format."""
    return Reader(form) if form.channels is None else ChannelReader(form, form.channels)


@lru_cache(64)
def _format_of(reading: OutputReading) -> OutputFormat:
    return OutputFormat(
        TOOL_FORMATS.get(reading.tool_format),
        REASONING_FORMATS.get(reading.reasoning_format),
        reading.begins_thinking,
        reading.hidden,
        {function: frozenset(parameters) for function, parameters in reading.texts},
    )
