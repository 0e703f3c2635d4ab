"""`python -m gateway_svc`, and what `penstock gateway` calls."""

import os
import sys
from collections.abc import Sequence

from contract.v1 import inference_pb2_grpc
from gateway_svc.service import GatewayService
from gateway_svc.settings import GatewaySettings
from servicekit import lifecycle
from servicekit.rpc import RpcService
from servicekit.settings import load


def main(argv: Sequence[str]) -> int:
    """Runs one gateway until it is told to end; the exit status."""
    settings = load(GatewaySettings, argv, os.environ)
    service = GatewayService(settings)
    inference = RpcService(
        "penstock.v1.Inference",
        inference_pb2_grpc.add_InferenceServicer_to_server,
        service.servicer(),
        is_control=False,  # it asks who calls by itself
    )
    return lifecycle.serve(service, settings, [inference], service.collectors())


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
