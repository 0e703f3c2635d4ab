"""Waits that end late are those of tests' own functions and methods, each once."""

import time
from types import ModuleType
from typing import Any

import pytest
from late_waits import delay_waits


class Pool:
    def wait_ready(self) -> int:
        return 4

    def read(self) -> int:
        return 5


def until(number: int) -> int:
    return number


def untilled() -> int:
    return 2


async def eventually() -> int:
    return 3


def module_of(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def test_waits_end_late_and_all_else_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pool_of_its_own = type("Pool", (Pool,), {"wait_ready": Pool.wait_ready})
    helper = module_of(__name__, until=until, untilled=untilled, eventually=eventually, Pool=pool_of_its_own)
    test = module_of("test", until=until, wait=time.monotonic)
    assert delay_waits([helper, test], 0.7) == 3
    assert delay_waits([helper, test], 0.7) == 0
    pool = helper.Pool()
    assert (helper.untilled(), pool.read()) == (2, 5)
    assert helper.eventually is eventually
    assert not slept
    assert (helper.until(1), test.until(number=1), pool.wait_ready()) == (1, 1, 4)
    assert slept == [0.7, 0.7, 0.7]
