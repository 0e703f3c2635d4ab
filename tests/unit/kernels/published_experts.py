"""Experts of the sizes of published models, of which none has a value, to be compiled with."""

import torch

from worker_svc.core.formats.fp8_channel import FP8
from worker_svc.core.formats.stacked.together import TOGETHER
from worker_svc.core.formats.words import BLOCK, WORDS
from worker_svc.core.kernels.experts.routing import Routed
from worker_svc.core.kernels.experts.sorting import SortedPairs
from worker_svc.core.kernels.experts.weights import FP4, INT4, ExpertWeights
from worker_svc.core.kernels.experts.weights import FP8 as FP8_FORM


def of_gpt_oss(outputs: int) -> ExpertWeights:
    """As gpt-oss-20b's, with fewer experts."""
    experts, inputs = 8, 2880
    numbers = torch.zeros(experts, outputs // TOGETHER, -(-inputs // BLOCK), TOGETHER, WORDS, dtype=torch.int32)
    return ExpertWeights(FP4, numbers, inputs, numbers[..., 0].contiguous(), torch.zeros(experts, outputs, 1))


def in_blocks() -> ExpertWeights:
    """Of 8 bits in blocks of 128."""
    numbers, scales = torch.zeros(8, 4096, 2048).to(FP8), torch.zeros(8, 4096, 16)
    return ExpertWeights(FP8_FORM, numbers, 2048, scales=scales, group=128)


def of_qwen(outputs: int, inputs: int, group: int, experts: int = 8) -> ExpertWeights:
    """As Qwen3-30B-A3B's in 4 bits, by default with fewer experts; group: as `ExpertWeights` has it."""
    numbers = torch.zeros(experts, outputs // TOGETHER, inputs // BLOCK, TOGETHER, WORDS, dtype=torch.int32)
    steps, each = (inputs // max(group, BLOCK), max(1, BLOCK // group)) if group else (1, 1)
    scales = torch.zeros(experts, steps, outputs, each, dtype=torch.int32)
    return ExpertWeights(INT4, numbers, inputs, scales=scales, group=group)


def some_pairs(rows: int, experts: int) -> tuple[Routed, SortedPairs]:
    to = Routed(torch.zeros(rows, 4, dtype=torch.int32), torch.zeros(rows, 4))
    return to, SortedPairs(torch.zeros(rows * 4, dtype=torch.int32), *torch.zeros(2, experts, dtype=torch.int32))
