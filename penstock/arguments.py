"""Checks of what `LLM` is given."""

from typing import Any

from contract.domain.errors import invalid

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype that is given by one of its names, or as torch's."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


def check_counts(**counts: int | None) -> None:
    """Refuse what is neither None nor a positive integer.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the argument.
    """
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise invalid(f"{name} must be a positive integer, got {value!r}", name)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not among the choices.

    Raises:
        PenstockError: INVALID_ARGUMENT naming the argument.
    """
    if value not in choices:
        raise invalid(f"{name} must be one of {', '.join(choices)}, got {value!r}", name)
