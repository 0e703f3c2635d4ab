"""Ranks of a worker that would exchange other things in their steps are refused, or do what all of them can."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from contract.domain.errors import PenstockError
from worker_svc import factory
from worker_svc.compute import TritonCompute
from worker_svc.core.distributed import Group
from worker_svc.runner_options import RunnerOptions

CPU = torch.device("cpu")
LIMIT_S = 300.0


class Place:
    """Where ranks in threads meet."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=LIMIT_S)
        self.values: list[Any] = [None, None]


class InThread(Group):
    """One of two ranks in one process."""

    def __init__(self, rank: int, place: Place) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "_place", place)

    def _all(self, value: Any) -> list[Any]:
        place: Place = self._place  # type: ignore[attr-defined]
        place.values[self.rank] = value
        place.barrier.wait()
        values = list(place.values)
        place.barrier.wait()
        return values

    def minimum(self, value: int, device: torch.device) -> int:
        return min(self._all(value))


def on_both(do: Callable[[Group], Any]) -> list[Any]:
    """What each rank gives, or raises."""
    place = Place()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(do, InThread(rank, place)) for rank in range(2)]
        return [each.exception(LIMIT_S) or each.result() for each in running]


@pytest.mark.parametrize("field", factory._ALIKE)
def test_ranks_whose_options_differ_are_refused_on_all_with_what_differs(field: str) -> None:
    values = ("one", "other")  # of whatever type it is

    def do(group: Group) -> None:
        options = RunnerOptions("model", rank=group.rank, **{field: values[group.rank]})  # type: ignore[arg-type]
        factory._require_alike(options, group, CPU)

    for error, value in zip(on_both(do), values, strict=True):
        assert isinstance(error, PenstockError)
        assert error.param == field
        assert error.message.endswith(f": {field} is {value!r} here")


def test_ranks_may_have_their_own_folders_and_memory() -> None:
    def do(group: Group) -> None:
        options = RunnerOptions(f"model-{group.rank}", rank=group.rank, kv_cache_memory_bytes=1000 + group.rank)
        factory._require_alike(options, group, CPU)

    assert on_both(do) == [None, None]


@pytest.mark.parametrize("of_other", ["none", "not recordable", "same"])
def test_a_package_attends_on_all_ranks_or_on_none(of_other: str) -> None:
    def do(group: Group) -> tuple[bool, bool]:
        found: Future[Any] = Future()
        package = SimpleNamespace(name="package", attend="attends", is_recordable=True)
        if group.rank == 1 and of_other == "not recordable":
            package.is_recordable = False
        found.set_result(None if group.rank == 1 and of_other == "none" else package)
        attention = MagicMock(takes_flash=True, flash=None)
        attention.use_flash = lambda flash: setattr(attention, "flash", flash)
        used = TritonCompute("", CPU, [], found)._use_flash(attention, group, CPU)
        return used is not None, attention.flash is not None

    attends = of_other == "same"
    assert on_both(do) == [(attends, attends)] * 2
