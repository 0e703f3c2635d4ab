"""Tokens that the device writes into the host's memory."""

import pytest
import torch
from kernel_inputs import DEVICE

from worker_svc.core.kernels.state.landing import store_on_host


@pytest.mark.parametrize("num_rows", [1, 16, 1500])
def test_tokens_are_in_the_host_s_memory_and_nothing_after_them(num_rows: int) -> None:
    tokens = torch.arange(1, num_rows + 1, device=DEVICE)
    room = torch.full((num_rows + 8,), -1, pin_memory=DEVICE.type == "cuda")
    store_on_host(tokens, room[:num_rows])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert room.tolist() == [*range(1, num_rows + 1), *[-1] * 8]
