"""Tables of tuning, of the products of this device: those that come along, and those that `penstock tune` wrote."""

import logging
import os
import re
from importlib.resources import files
from pathlib import Path

import torch

from contract.domain.errors import broken, invalid
from worker_svc.core.kernels.linear.table import Card, Line, Table, read_table

# Of the standard library, as in `factory`.
_log = logging.getLogger(__name__)

_PACKAGED = files("worker_svc.core.kernels.linear") / "tables"
_INTERPRETED = Card((9, 0), 132)  # Triton's interpreter is asked for what that card is


def card_of(device: torch.device) -> Card:
    """The card that computes; where none does, the one that Triton's interpreter stands for."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Card((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def default_file(card: Card) -> Path:
    """The file of a card's table in the folder where compiled kernels are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = re.sub(r"[^a-z0-9]+", "-", f"{card.name or 'card'} {card.multiprocessors}".lower())
    return Path(cache).expanduser() / "penstock" / "tuning" / f"{name}.json"


def find_lines(device: torch.device, file: str | None = None) -> tuple[Line, ...]:
    """The lines for this device, in the order in which they count: of `file`, by default the one that is its own in the
    cache if that is there, then of what comes along. Without any, all products are cuBLAS's.

    Raises:
        PenstockError: INVALID_ARGUMENT: `file` is not there, is no table or one of another card; INTERNAL (operator):
            the one in the cache is no table.
    """
    card = card_of(device)
    tuned, packaged = _tuned_lines(card, file), packaged_lines(card)
    _log.info("tables of products read", extra={"card": card.name, "tuned": len(tuned), "packaged": len(packaged)})
    return *tuned, *packaged


def packaged_lines(card: Card) -> tuple[Line, ...]:
    """The lines that come along for a card: first those of its name."""
    tables = [read_table(path.read_bytes()) for path in _PACKAGED.iterdir() if path.name.endswith(".json")]
    tables.sort(key=lambda table: table.card.name is None)
    return tuple(line for table in tables if table.card.includes(card) for line in table.lines)


def read_tuned(path: Path, card: Card) -> Table:
    """A table that `penstock tune` wrote for this card.

    Raises:
        ValueError: it is none, or one of another card; the message says so in a sentence.
        OSError: it cannot be read.
    """
    table = read_table(path.read_bytes())
    if not table.card.includes(card):
        raise ValueError(f"it is of {_describe(table.card)}, and here is {_describe(card)}")
    return table


def _tuned_lines(card: Card, file: str | None) -> tuple[Line, ...]:
    path = default_file(card) if file is None else Path(file).expanduser()
    try:
        return read_tuned(path, card).lines
    except FileNotFoundError:
        if file is None:
            return ()
        raise invalid(f"tuning is {file}, which is not there: `penstock tune` writes one", "tuning") from None
    except (OSError, ValueError) as error:
        if file is None:
            raise broken(
                f"{path} is no table of tuning ({error}): remove it, or let `penstock tune` write it"
            ) from None
        raise invalid(f"tuning is {file}, which is no table for this card: {error}", "tuning") from None


def _describe(card: Card) -> str:
    major, minor = card.capability
    of = f"capability {major}.{minor} with {card.multiprocessors} multiprocessors"
    return of if card.name is None else f"{card.name} of {of}"
