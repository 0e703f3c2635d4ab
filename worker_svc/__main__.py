"""`python -m worker_svc`, and what `penstock worker` calls."""

import os
import sys
from collections.abc import Sequence

from contract.v1 import worker_pb2_grpc
from servicekit import lifecycle
from servicekit.bus import open_bus
from servicekit.rpc import RpcService
from servicekit.settings import load
from worker_svc.service import WorkerService
from worker_svc.servicer import WorkerServicer
from worker_svc.settings import WorkerSettings


def main(argv: Sequence[str]) -> int:
    """Runs one rank of a worker until it is told to end; the exit status. The process of one that fails ends here."""
    # Nothing here is compiled by torch; what quack-kernels would have it compile makes it import its compiler, for more
    # than a second.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    settings = load(WorkerSettings, argv, os.environ)
    service = WorkerService(settings, open_bus(settings.bus_url, settings.pool))
    control = RpcService("penstock.v1.Worker", worker_pb2_grpc.add_WorkerServicer_to_server, WorkerServicer(service))
    status = lifecycle.serve(service, settings, [control], service.collectors())
    if status == lifecycle.EXIT_FAILED:
        # The libraries of a device that hangs would wait for it while the interpreter ends.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
