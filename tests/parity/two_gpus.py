"""Whether two tensor-parallel ranks can be on GPUs here."""

import os

import pytest
import torch

# On one GPU, which the ranks then share, NCCL lets them only if it is told so, from 2.30 on.
_SHARE_ONE = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < (1 if _SHARE_ONE else 2), reason="needs two GPUs")
