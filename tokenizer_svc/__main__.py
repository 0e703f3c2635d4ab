"""`python -m tokenizer_svc`, and what `penstock tokenizer` calls."""

import os
import sys
from collections.abc import Sequence

from servicekit import lifecycle
from servicekit.bus import open_bus
from servicekit.settings import load
from tokenizer_svc.loading import load_vocabulary
from tokenizer_svc.service import TokenizerService
from tokenizer_svc.servicer import rpc_service
from tokenizer_svc.settings import TokenizerSettings


def main(argv: Sequence[str]) -> int:
    """Runs one tokenizer until it is told to end; the exit status."""
    settings = load(TokenizerSettings, argv, os.environ)
    vocabulary = load_vocabulary(
        settings.model,
        revision=settings.revision,
        max_model_len=settings.max_model_len,
        generation_config=settings.generation_config,
        trust_request_chat_template=settings.trust_request_chat_template,
    )
    service = TokenizerService(settings, open_bus(settings.bus_url, settings.pool), vocabulary)
    return lifecycle.serve(service, settings, [rpc_service(service.prompts)], service.collectors())


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
