"""Bytes and messages that nobody should send, from a seeded die."""

import os
import random
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "20"))  # of each kind; more on demand
SEED = int(os.environ.get("FUZZ_SEED", "1"))
EXTREMES = (0, 1, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "x", "é☃😀", "\x00", "a" * 3000, "%s{}\r\n", "../../etc", "ffffffffffffffffffffffffffffffff", "1e999")


def random_bytes(dice: random.Random, most: int = 200) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 3, 16, dice.randrange(most))))


def mutated(dice: random.Random, payload: bytes) -> bytes:
    """Up to four changes: bits, bytes, cuts, repeats, numbers at their limits, or something else altogether."""
    data = bytearray(payload)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(data) + 1)
        match dice.randrange(7):
            case 0 if data:
                data[place % len(data)] ^= 1 << dice.randrange(8)
            case 1:
                del data[place : place + dice.randrange(1, 9)]
            case 2:
                data[place:place] = random_bytes(dice, 20)
            case 3:
                data[place:place] = data[max(0, place - dice.randrange(32)) : place]
            case 4:
                data[place : place + 4] = dice.choice(EXTREMES).to_bytes(8, "little")[:4]
            case 5:
                del data[place:]
            case _ if dice.random() < 0.2:
                data = bytearray(random_bytes(dice))
    return bytes(data)


def mutated_fields(dice: random.Random, fields: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """An entry of a stream with fields that are missing, renamed, too many, or changed; never without any."""
    found = dict(fields)
    for _ in range(dice.randint(1, 2)):
        name = dice.choice(list(found))
        match dice.randrange(5):
            case 0 if len(found) > 1:
                del found[name]
            case 1:
                found[random_bytes(dice, 8)] = found.pop(name)
            case 2:
                found[random_bytes(dice, 8)] = random_bytes(dice)
            case _:
                found[name] = mutated(dice, found[name])
    return found


def fill(dice: random.Random, message: Message, depth: int = 3) -> Message:
    """Sets about half of a message's fields to whatever their types allow."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.5 or (field.type == F.TYPE_MESSAGE and depth == 0):
            continue
        if field.is_repeated:
            entries = getattr(message, field.name)
            for _ in range(dice.randrange(4)):
                if field.type == F.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
                    fill(dice, entries.add(), depth - 1)
                elif field.type != F.TYPE_MESSAGE:
                    entries.append(_value(dice, field))
        elif field.type == F.TYPE_MESSAGE:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(dice, part, depth - 1)
        else:
            setattr(message, field.name, _value(dice, field))
    return message


_VALUES = (
    (("BOOL",), (False, True)),
    (("FLOAT", "DOUBLE"), (0.0, -1.0, 1.0, 0.5, 1e30, float("nan"), float("inf"))),
    (("ENUM",), (0, 1, 7, 1000)),
    (("INT32", "SINT32", "SFIXED32"), (0, 1, -1, 2**31 - 1, -(2**31))),
    (("INT64", "SINT64", "SFIXED64"), (0, 1, -1, 2**63 - 1, -(2**63))),
    (("UINT32", "FIXED32"), (0, 1, 2, 17, 2**31, 2**32 - 1)),
    (("UINT64", "FIXED64"), (0, 1, 2, 17, 2**63, 2**64 - 1)),
    (("STRING",), TEXTS),
)
_CHOICES: dict[int, tuple[Any, ...]] = {
    getattr(F, f"TYPE_{name}"): values for names, values in _VALUES for name in names
}


def _value(dice: random.Random, field: F) -> Any:
    if field.type == F.TYPE_BYTES:
        return dice.choice((random_bytes(dice), dice.randbytes(4 * dice.randrange(9)), bytes(16)))
    return dice.choice(_CHOICES[field.type])
