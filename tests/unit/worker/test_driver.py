"""The CUDA driver is woken for the GPU that the rank will have, and missed by nobody."""

import ctypes
from typing import Any

import pytest

from worker_svc import driver


class FakeDriver:
    """A machine with some GPUs; remembers whose context was asked for."""

    def __init__(self, num_gpus: int, status: int = 0) -> None:
        self._num_gpus = num_gpus
        self._status = status
        self.retained: list[int] = []

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._num_gpus
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 100 + ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        context._obj.value = 1
        self.retained.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("num_gpus", "status", "rank", "retained"),
    [(1, 0, 0, [100]), (4, 0, 2, [102]), (2, 0, 3, [101]), (0, 0, 0, []), (1, 100, 0, [])],
)
def test_a_context_is_made_on_the_ranks_gpu_where_there_is_one(
    num_gpus: int, status: int, rank: int, retained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDriver(num_gpus, status)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: fake)
    driver.wake_driver(rank).join()
    assert fake.retained == retained


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_DRIVER", "libabsent.so.1")
    driver.wake_driver(0).join()
