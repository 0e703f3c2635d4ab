"""`penstock serve`: the whole pipeline on this machine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from contract.domain.errors import ErrorCode, PenstockError
from penstock.launcher import pipeline
from penstock.launcher.layout import BUNDLED_MODEL, Child, Launch, callable_address, parse
from servicekit.bus.calls import SessionKind


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or Ctrl-C; the exit status."""
    launch = parse(argv, os.environ)
    model = launch.settings.model
    if model == str(BUNDLED_MODEL) and not BUNDLED_MODEL.is_dir():
        raise PenstockError(ErrorCode.INTERNAL, "this installation has no bundled model: name one with --model")
    if _is_path(model) and not Path(model).is_dir():
        raise PenstockError(ErrorCode.INTERNAL, f"--model {model}: there is no such directory")
    return pipeline.run(launch, lambda children: _invite(launch, children))


def _is_path(model: str) -> bool:
    """Return whether it cannot be a hub id: those are `name` or `owner/name`, and name no file here."""
    return model.startswith((".", "~", "/")) or model.count("/") > 1 or model.endswith("/") or Path(model).is_file()


def _invite(launch: Launch, children: list[Child]) -> None:
    """Says where and how the pipeline can be called."""
    gateways = [child for child in children if child.kind is SessionKind.GATEWAY]
    http, grpc = (
        callable_address(address).replace("127.0.0.1", "localhost")
        for address in (gateways[0].http_address, gateways[0].grpc_address)
    )
    model, scheme, flags = launch.model_name, "http", ""
    if launch.metrics.tls_files is not None:
        scheme, flags = "https", " --tls"
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
    print(f"\nPenstock serves {model}\n")
    for gateway in gateways:
        print(f"  OpenAI HTTP  {scheme}://{gateway.http_address}/v1")
        print(f"  gRPC         {gateway.grpc_address}  (penstock.v1.Inference)")
    print(f"\n  curl -N {scheme}://{http}/v1/chat/completions -H 'Content-Type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n")
    if port := launch.settings.metrics_port:
        print(f"  metrics      {scheme}://{launch.settings.host}:{port}/metrics")
    print(f"  penstock chat --address {grpc}{flags}")
    token = f" --control-token-file {gateways[0].control_token_file}" if gateways[0].control_token_file else ""
    print(f"  penstock status --watch --address {grpc}{flags}{token}\n", flush=True)
