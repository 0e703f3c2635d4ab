"""`python -m detokenizer_svc`, and what `penstock detokenizer` calls."""

import os
import sys
from collections.abc import Sequence

from detokenizer_svc.service import DetokenizerService
from detokenizer_svc.servicer import rpc_service
from detokenizer_svc.settings import DetokenizerSettings
from servicekit import lifecycle
from servicekit.bus import open_bus
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.tokenizer import read_tokenizer
from servicekit.settings import load


def main(argv: Sequence[str]) -> int:
    """Runs one detokenizer until it is told to end; the exit status."""
    settings = load(DetokenizerSettings, argv, os.environ)
    tokenizer = read_tokenizer(find_checkpoint(settings.model, settings.revision))
    collector = None
    if settings.otlp_traces_endpoint:
        from detokenizer_svc.otlp import Collector  # noqa: PLC0415  (the packages of an extra)

        collector = Collector(settings.otlp_traces_endpoint)
    service = DetokenizerService(settings, open_bus(settings.bus_url, settings.pool), tokenizer, collector)
    return lifecycle.serve(service, settings, [rpc_service(service.followers)], service.collectors())


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
