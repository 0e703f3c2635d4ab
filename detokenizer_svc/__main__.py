"""`python -m detokenizer_svc`, and what `penstock detokenizer` calls."""

import os
import sys
from collections.abc import Sequence

from detokenizer_svc.service import DetokenizerService
from detokenizer_svc.servicer import DetokenizerServicer
from detokenizer_svc.settings import DetokenizerSettings
from detokenizer_svc.tokenizer_file import load_tokenizer
from penstock.v1 import detokenizer_pb2_grpc
from servicekit import lifecycle
from servicekit.bus import open_bus
from servicekit.rpc import RpcService
from servicekit.settings import load


def main(argv: Sequence[str]) -> int:
    """Runs one detokenizer until it is told to end; the exit status."""
    settings = load(DetokenizerSettings, argv, os.environ)
    tokenizer = load_tokenizer(settings.model, settings.revision)
    service = DetokenizerService(settings, open_bus(settings.redis_url, settings.pool), tokenizer)
    rpc = RpcService(
        "penstock.v1.Detokenizer",
        detokenizer_pb2_grpc.add_DetokenizerServicer_to_server,
        DetokenizerServicer(service.followers),
    )
    return lifecycle.serve(service, settings, [rpc], service.collectors())


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
