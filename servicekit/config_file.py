"""A file of settings: flags by their names, in YAML. What a command line says counts for more."""

import argparse
import difflib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.domain.errors import ErrorCode, PenstockError

FLAG = "--config"
HELP = "YAML file of flags, such as `port: 8000`; flags count for more, the environment for less [none]"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names the file."""
    parser.add_argument(FLAG, metavar="FILE", help=HELP)


def expand_config(argv: Sequence[str], switches: Mapping[str, bool]) -> list[str]:
    """The command line with the flags of its file, if it names one, before its own.

    Args:
        argv: the command line.
        switches: the flags that there are, without dashes before them; true: it is a switch without a value.

    Raises:
        PenstockError: INTERNAL (the operator's fault): the file cannot be read, or says what is no flag.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG)
    try:
        path = parser.parse_known_args(list(argv))[0].config
    except argparse.ArgumentError:  # who reads all flags says it
        return list(argv)
    if path is None:
        return list(argv)
    flags: list[str] = []
    for name, value in _read(Path(path)).items():
        flags += _flag(path, str(name).replace("_", "-"), value, switches)
    return [*flags, *argv]


def _read(path: Path) -> dict[Hashable, Any]:
    import yaml  # noqa: PLC0415  (most processes have no such file)

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            names = [str(self.construct_object(key)).replace("_", "-") for key, _ in node.value]
            if twice := {name for name in names if names.count(name) > 1}:
                raise _wrong(path, f"{', '.join(sorted(twice))} stands there twice")
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(path.read_text("utf-8"), Loader)  # noqa: S506  (a safe one)
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, f"it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise _wrong(path, f"it is not YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _wrong(path, "it must have a flag and its value a line, such as `port: 8000`")
    return found


def _flag(path: str, name: str, value: Any, switches: Mapping[str, bool]) -> list[str]:
    if name not in switches:
        nearest = difflib.get_close_matches(name, sorted(switches), 1)
        question = f": did you mean {nearest[0]}?" if nearest else ""
        raise _wrong(path, f"there is no flag --{name}{question}")
    if switches[name]:
        if not isinstance(value, bool):
            raise _wrong(path, f"{name} is true or false, got {value!r:.80}")
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={_text(path, name, value)}"]


def _text(path: str, name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ",".join(_text(path, name, each) for each in value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(path, f"{name} must be a text, a number or a list of them, got {value!r:.80}")
    return str(value)


def _wrong(path: str | Path, what: str) -> PenstockError:
    return PenstockError(ErrorCode.INTERNAL, f"{FLAG} {path}: {what}")
