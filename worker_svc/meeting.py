"""The meeting of a worker's tensor-parallel ranks."""

import time
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from contract.domain.errors import ErrorCode, PenstockError, invalid
from worker_svc.core.distributed import Group

_PATIENCE = timedelta(minutes=30)  # with ranks that are not there yet
_PAUSE_S = 0.5  # before a rank looks again whether another rank 0 is there
_COMPLETE, _HERE = "penstock/complete", "penstock/here/"  # keys of a store


def connect(rank: int, world_size: int, address: str, device: torch.device) -> Group:
    """Join the ranks that meet at `address` (`tcp://host:port`, or `file://path` on one host); waits for all of them.

    The exchange goes over NCCL where the device is a GPU, else over gloo.

    Raises:
        PenstockError: INVALID_ARGUMENT: this is no address; INTERNAL: the others did not come, or rank 0 ended
            meanwhile.
    """
    if world_size == 1:
        return Group()
    is_cuda = device.type == "cuda"
    where: dict[str, Any] = {"init_method": address}
    try:
        if address.startswith("tcp://"):
            where = {"store": _meet(rank, world_size, address)}
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            rank=rank,
            world_size=world_size,
            device_id=device if is_cuda else None,
            **where,
        )
    except dist.DistError as error:
        message = f"rank {rank} of {world_size} did not meet the others at {address}: {error}"
        raise PenstockError(ErrorCode.INTERNAL, message) from error
    return Group(rank, world_size, dist.group.WORLD)


def _meet(rank: int, world_size: int, address: str) -> Any:
    """The store of rank 0 in which all ranks are, as often as that takes: one that was started again may find the store
    of a rank 0 that has not ended yet.
    """
    place = urlsplit(address)
    if place.hostname is None or place.port is None:
        raise invalid(f"distributed_address is {address}, which has no host or no port", "distributed_address")
    while True:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.hostname, place.port, world_size, rank == 0, timeout=_PATIENCE, wait_for_workers=False
        )
        if enter(store, rank, world_size):
            return store
        del store
        time.sleep(_PAUSE_S)


class Store(Protocol):
    """Of torch's stores what ranks meet by; keys that are there stay."""

    def set(self, key: str, value: str) -> object:
        """Write it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Wait until all are there.

        Raises:
            DistError: for too long, or the store is gone.
        """


def enter(store: Store, rank: int, world_size: int) -> bool:
    """Wait for all ranks in rank 0's store; false: those of this store have met before.

    Raises:
        DistError: they did not come, or the store is gone.
    """
    if rank == 0:
        store.wait([f"{_HERE}{other}" for other in range(1, world_size)], _PATIENCE)
        store.set(_COMPLETE, "")
        return True
    if store.check([_COMPLETE]):
        return False
    store.set(f"{_HERE}{rank}", "")
    store.wait([_COMPLETE], _PATIENCE)
    return True
