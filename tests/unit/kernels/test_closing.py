"""What a closed runner gives back."""

import weakref

import pytest
from kernel_inputs import DEVICE, LINES
from plans import drive
from runner_configs import CONFIG
from test_triton_runner import PLAIN, make_runner, sequences

from worker_svc.compute import TritonCompute


@pytest.mark.skipif(DEVICE.type == "cuda", reason="runs in the interpreter")
@pytest.mark.usefixtures("large_tiles")
def test_what_a_runner_had_is_gone_when_it_is_closed_though_it_is_held() -> None:
    runner = make_runner(CONFIG, TritonCompute("", DEVICE, LINES))
    drive(runner, sequences(PLAIN), chunk=24)
    had = [weakref.ref(runner._decoder), weakref.ref(runner._cache.keys)]
    runner.close()
    assert [each() for each in had] == [None, None]
