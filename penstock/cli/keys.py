"""`penstock keys`: makes API keys."""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence

from contract.domain.api_keys import API_KEY_BYTES, hash_api_key, is_tenant

_PREFIX = "psk_"  # so that people, and programs that look for leaked secrets, know one when they see it


def main(argv: Sequence[str]) -> int:
    """Prints a new key and, below it, the line for the gateway's file; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock keys", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        help="make a key",
        description="Prints a new key, which is kept nowhere, and the line for the gateway's --api-keys-file.",
        allow_abbrev=False,
    )
    new.add_argument("--tenant", type=_tenant, required=True, help="for whom requests with this key are served")
    new.add_argument("--name", help="whose key it is, for people")
    new.add_argument("--min-priority", type=_priority, help="requests with this key get no lower priority; none: any")
    for name, what in (
        ("rpm", "calls with this key in a minute, 429 beyond"),
        ("tpm", "tokens of prompts and outputs in a minute, 429 beyond"),
        ("max-running", "requests with this key that have not ended, 429 beyond"),
    ):
        new.add_argument(f"--{name}", type=_limit, help=f"{what}; none: as many as it likes")
    arguments = parser.parse_args(argv)
    key = _PREFIX + secrets.token_urlsafe(API_KEY_BYTES)
    optional = {name: getattr(arguments, name) for name in ("name", "min_priority", "rpm", "tpm", "max_running")}
    entry = {
        "tenant": arguments.tenant,
        "sha256": hash_api_key(key).hex(),
        **{name: value for name, value in optional.items() if value is not None},
    }
    print("the key, for who calls; it is shown this once:", file=sys.stderr)
    print(key, flush=True)
    print("its line, for the gateway's --api-keys-file:", file=sys.stderr)
    print(json.dumps(entry))
    return 0


def _limit(text: str) -> int:
    limit = int(text)
    if not 1 <= limit < 2**31:
        raise argparse.ArgumentTypeError("a limit is an integer, 1 or more")
    return limit


def _priority(text: str) -> int:
    priority = int(text)
    if not -(2**31) <= priority < 2**31:
        raise argparse.ArgumentTypeError("a priority is a 32-bit integer")
    return priority


def _tenant(text: str) -> str:
    if not is_tenant(text):
        raise argparse.ArgumentTypeError("a tenant's name is 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return text
