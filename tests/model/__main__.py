"""Explores a space that is put together here, or the spaces of the tests: `python tests/model --help`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "memory"))  # as pytest has it

from explorer import Exploration, explore, wander
from samplers import Kind
from spaces import SPACES
from world import Faults, Penstock, Space

_NUMBERS = ("gateways", "tokenizers", "schedulers", "workers", "detokenizers", "requests", "samples", "max_tokens")


def main(argv: Sequence[str]) -> int:
    """0: every promise held in what was explored; 1: a counterexample was found."""
    arguments = _parser().parse_args(argv)
    found_any = False
    for space in SPACES if arguments.tests else [_space(arguments)]:
        found = _explore(space, arguments)
        print(f"{space.name}: {found}", flush=True)
        if found.counterexample:
            found_any = True
            print(found.counterexample)
    return int(found_any)


def _explore(space: Space, arguments: argparse.Namespace) -> Exploration:
    if arguments.walk:
        return wander(Penstock(space), seconds=arguments.seconds, seed=arguments.seed)
    return explore(Penstock(space), seconds=arguments.seconds)


def _space(arguments: argparse.Namespace) -> Space:
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    everybody = frozenset(
        f"{kind}{index}"
        for kind in ("gateway", "tokenizer", "scheduler", "detokenizer", "worker")
        for index in range(10)
    )
    return Space(
        "this space",
        kinds=tuple(Kind) if arguments.ends else (Kind.PLAIN,),
        may_cancel=arguments.cancels,
        compacts=arguments.compacts,
        is_warm=arguments.warm,
        mortal=everybody,
        pausing=everybody,
        faults=Faults(*(getattr(arguments, name) for name in Faults._fields)),
        **numbers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/model", description=__doc__)
    parser.add_argument("--tests", action="store_true", help="the spaces of the tests, one after the other")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop looking")
    parser.add_argument("--walk", action="store_true", help="walk at random instead of visiting every state")
    parser.add_argument("--seed", type=int, default=0, help="of the random walks")
    for name in _NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Space, name))
    for name in Faults._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, help="how many may happen")
    parser.add_argument("--ends", action="store_true", help="samplers also come up with EOS and stop strings")
    parser.add_argument("--cancels", action="store_true", help="clients may cancel")
    parser.add_argument("--compacts", action="store_true", help="logs are compacted at any time")
    parser.add_argument("--warm", action="store_true", help="begin with a request that is claimed")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
