"""A model's name where nobody has given it another one."""

from pathlib import PurePath


def served_name(model: str) -> str:
    """The name that clients use: the last part of a directory's path; a hub id as it is."""
    path = PurePath(model)
    return path.name if path.is_absolute() or model.startswith(".") else model
