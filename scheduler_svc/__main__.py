"""`python -m scheduler_svc`, and what `penstock scheduler` calls."""

import os
import sys
from collections.abc import Sequence

from contract.v1 import scheduler_pb2_grpc
from scheduler_svc.service import SchedulerService
from scheduler_svc.servicer import SchedulerServicer
from scheduler_svc.settings import SchedulerSettings
from servicekit import lifecycle
from servicekit.bus import open_bus
from servicekit.rpc import RpcService
from servicekit.settings import load


def main(argv: Sequence[str]) -> int:
    """Runs one scheduler until it is told to end; the exit status."""
    settings = load(SchedulerSettings, argv, os.environ)
    bus = open_bus(settings.bus_url, settings.pool, busy_poll_s=settings.busy_poll_us * 1e-6)
    service = SchedulerService(settings, bus)
    rpc = RpcService(
        "penstock.v1.Scheduler",
        scheduler_pb2_grpc.add_SchedulerServicer_to_server,
        SchedulerServicer(service),
    )
    return lifecycle.serve(service, settings, [rpc], service.collectors())


if __name__ == "__main__":
    sys.exit(lifecycle.start(main, sys.argv[1:]))
