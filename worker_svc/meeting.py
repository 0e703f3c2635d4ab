"""The meeting of a worker's tensor-parallel ranks."""

import logging
import secrets
import time
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from contract.domain.errors import invalid
from worker_svc.core.distributed import Group

_log = logging.getLogger(__name__)

_PATIENCE = timedelta(minutes=30)  # with ranks that are not there yet
_GOING_ON = timedelta(seconds=60)  # for each to see that all are there
_PAUSE_S = 0.5  # before a rank looks again whether another rank 0 is there
_COMPLETE, _HERE, _GOES_ON = "penstock/complete", "penstock/here/", "penstock/goes on/"  # keys of a store


def connect(rank: int, world_size: int, address: str, device: torch.device) -> Group:
    """Join the ranks that meet at `address` (`tcp://host:port`, or `file://path` on one host); waits for all of them.

    The exchange goes over NCCL where the device is a GPU, else over gloo.

    Raises:
        PenstockError: INVALID_ARGUMENT: this is no address.
        RuntimeError: the others did not come, or one ended meanwhile: to begin again may help.
    """
    if world_size == 1:
        return Group()
    is_cuda = device.type == "cuda"
    where: dict[str, Any] = {"init_method": address}
    if address.startswith("tcp://"):
        where = {"store": _meet(rank, world_size, address)}
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        rank=rank,
        world_size=world_size,
        device_id=device if is_cuda else None,
        **where,
    )
    return Group(rank, world_size, dist.group.WORLD)


def _meet(rank: int, world_size: int, address: str) -> Any:
    """The store of rank 0 in which all ranks are, as often as that takes: one that was started again may find the store
    of a rank 0 that has not ended yet.
    """
    place = urlsplit(address)
    if place.hostname is None or place.port is None:
        raise invalid(f"distributed_address is {address}, which has no host or no port", "distributed_address")
    has_told = False
    while True:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.hostname, place.port, world_size, rank == 0, timeout=_PATIENCE, wait_for_workers=False
        )
        if enter(store, rank, world_size):
            return store
        if not has_told:
            _log.warning("waiting for another rank 0: the one that is there has met its ranks already")
            has_told = True
        del store
        time.sleep(_PAUSE_S)


class Store(Protocol):
    """Of torch's stores what ranks meet by; keys that are there stay."""

    def set(self, key: str, value: str) -> object:
        """Write it."""

    def get(self, key: str) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Wait until all are there.

        Raises:
            DistError: for too long, or the store is gone.
        """


def enter(store: Store, rank: int, world_size: int) -> bool:
    """Wait for all ranks in rank 0's store; false: others have met in it.

    Each writes a word of its own, and rank 0 those that it found: one that was started again meanwhile has another.

    Raises:
        RuntimeError: they did not come, one of them ended meanwhile, or the store is gone.
    """
    if rank == 0:
        keys = [f"{_HERE}{other}" for other in range(1, world_size)]
        store.wait(keys, _PATIENCE)
        words = [store.get(key).decode() for key in keys]
        store.set(_COMPLETE, ",".join(words))
        store.wait([f"{_GOES_ON}{word}" for word in words], _GOING_ON)
        return True
    if store.check([_COMPLETE]):
        return False
    word = secrets.token_hex(8)
    store.set(f"{_HERE}{rank}", word)
    store.wait([_COMPLETE], _PATIENCE)
    if word not in store.get(_COMPLETE).decode().split(","):
        return False
    store.set(f"{_GOES_ON}{word}", "")
    return True
