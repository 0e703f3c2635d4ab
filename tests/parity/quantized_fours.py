"""Weights in floats of 4 bits, and what these stand for, element by element; see `quantized`."""

from collections.abc import Mapping

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

Stored = dict[str, Tensor]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def four_bits(value: float) -> int:
    """The nearest of the floats, as a sign and a place among the magnitudes."""
    return (8 if value < 0 else 0) + min(range(8), key=lambda place: abs(E2M1[place] - abs(value)))


def bytes_of_fours(numbers: list[list[int]]) -> Tensor:
    return torch.tensor(
        [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)] for row in numbers], dtype=torch.uint8
    )


def float_at(row: list[int], place: int) -> float:
    number = row[place // 2] >> 4 if place % 2 else row[place // 2] & 15
    return E2M1[number & 7] * (-1 if number & 8 else 1)


def nvfp4(weight: Tensor, names: tuple[str, str], *, divides: bool) -> Stored:
    largest = weight.abs().max() / (6 * LARGEST)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / largest).to(FP8)
    divided = groups / (scales.float() * largest).unsqueeze(-1)
    numbers = [[four_bits(value) for value in row] for row in divided.flatten(1).tolist()]
    numbers_name, scale_name = names
    of_all = (1 / largest).unsqueeze(0) if divides else largest
    input_name = "input_global_scale" if divides else "input_scale"
    stored = {numbers_name: bytes_of_fours(numbers), "weight_scale": scales, scale_name: of_all}
    return {**stored, input_name: torch.tensor(0.5)}


def of_nvfp4(stored: Mapping[str, Tensor], names: tuple[str, str], *, divides: bool) -> Tensor:
    rows, scales = stored[names[0]].tolist(), stored["weight_scale"].float().tolist()
    of_all = float(stored[names[1]])

    def at(output: int, place: int) -> float:
        scale = scales[output][place // 16]
        return float_at(rows[output], place) * (scale / of_all if divides else scale * of_all)

    return torch.tensor([[at(output, place) for place in range(2 * len(rows[0]))] for output in range(len(rows))])


def mxfp4(weight: Tensor) -> Stored:
    exponents = torch.stack([(group.abs().amax(1) / 6).log2().ceil() for group in weight.split(32, 1)], 1)
    divided = weight / exponents.exp2().repeat_interleave(32, 1)[:, : weight.shape[1]]
    numbers = [[four_bits(value) for value in row] for row in divided.tolist()]
    return {"weight_packed": bytes_of_fours(numbers), "weight_scale": (exponents + 127).to(torch.uint8)}


def of_mxfp4(stored: Mapping[str, Tensor]) -> Tensor:
    rows, exponents = stored["weight_packed"].tolist(), stored["weight_scale"].tolist()

    def at(output: int, place: int) -> float:
        return float_at(rows[output], place) * 2.0 ** (exponents[output][place // 32] - 127)

    return torch.tensor([[at(output, place) for place in range(2 * len(rows[0]))] for output in range(len(rows))])
