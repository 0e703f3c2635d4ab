"""Messages that nobody can read, kept for the operator."""

from collections.abc import Mapping

from servicekit.bus.calls import Append
from servicekit.bus.keys import DEAD_CAP, STREAM, WHY, Keys


def dead_letter(names: Keys, stream: str, fields: Mapping[bytes, bytes], why: str) -> Append:
    """Moves an entry of a stream, or what was in it, to `dead`, of which the last ones are kept."""
    return Append(names.dead, {**fields, STREAM: stream.encode(), WHY: why.encode()}, DEAD_CAP)
