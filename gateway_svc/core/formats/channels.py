"""The words in which outputs of several messages are written down, each with a header that says its channel."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Channels:
    """The marks of messages: `<start>role<channel>name to=recipient <constrain>json<message>text<end>`.

    A prompt ends after the first role. The recipient may stand before the channel instead.
    """

    start: str
    channel: str
    constrain: str
    message: str
    end: str  # of a message that others of the output follow
    last: tuple[str, ...]  # ends of the output
    role: str  # whose messages an output is made of
    thoughts: str  # names of channels
    remarks: str  # for the user, between calls
    answer: str
    functions: str  # begins the recipients that are functions

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may be tokens of their own."""
        return (self.start, self.channel, self.constrain, self.message, self.end, *self.last)

    def opening(self, channel: str) -> str:
        """The beginning of a message for nobody but the user."""
        return f"{self.channel}{channel}{self.message}"
