"""Weights in integers of 4 and 8 bits, and what these stand for, element by element; see `quantized`."""

from collections.abc import Mapping
from typing import Any

import torch
from quantized_fours import Stored
from torch import Tensor


def numbered(weight: Tensor, bits: int, group: int | None, *, order: bool) -> tuple[list[list[int]], ...]:
    """Numbers [outputs][inputs] of so many bits, zeros and scales [outputs][groups], and the group of each input."""
    outputs, inputs = weight.shape
    size = group or inputs
    members = [number // size for number in range(inputs)]
    if order:
        members = [
            members[place] for place in torch.randperm(inputs, generator=torch.Generator().manual_seed(1)).tolist()
        ]
    numbers = [[0] * inputs for _ in range(outputs)]
    zeros, scales = ([[0] * (max(members) + 1) for _ in range(outputs)] for _ in range(2))
    for row, values in enumerate(weight.tolist()):
        for number in range(max(members) + 1):
            of_group = [value for value, member in zip(values, members, strict=True) if member == number]
            low, high = min(0.0, *of_group), max(0.0, *of_group)
            scale = float(torch.tensor((high - low) / (2**bits - 1)).half())
            scales[row][number], zeros[row][number] = scale, max(1, min(2**bits - 1, round(-low / scale)))
        for column, (value, member) in enumerate(zip(values, members, strict=True)):
            number = round(value / scales[row][member]) + zeros[row][member]
            numbers[row][column] = max(0, min(2**bits - 1, number))
    return numbers, zeros, scales, [members]


def words(rows: list[list[int]], bits: int, places: list[int] | None = None) -> Tensor:
    """Each row's numbers, 32 // bits of them in a word; the one at `places[i]` of a word's is the i-th of these."""
    each = 32 // bits
    places = places or list(range(each))
    found = []
    for row in rows:
        padded = row + [0] * (-len(row) % each)
        found.append([])
        for first in range(0, len(padded), each):
            word = sum(padded[first + number] << (bits * place) for number, place in enumerate(places))
            found[-1].append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(found, dtype=torch.int32)


def number_at(words_of_row: list[int], place: int, bits: int) -> int:
    word = words_of_row[place * bits // 32] % 2**32
    return word >> (place * bits % 32) & (2**bits - 1)


def turned(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(row) for row in zip(*rows, strict=True)]


AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def awq(weight: Tensor, group: int | None) -> Stored:
    numbers, zeros, scales, _ = numbered(weight, 4, group, order=False)
    return {
        "qweight": words(turned(numbers), 4, AWQ_PLACES),
        "qzeros": words(turned(zeros), 4, AWQ_PLACES),
        "scales": torch.tensor(turned(scales)).half(),
    }


def of_awq(stored: Mapping[str, Tensor], group: int | None) -> Tensor:
    numbers, zeros, scales = (stored[name].tolist() for name in ("qweight", "qzeros", "scales"))
    size = group or len(numbers)

    def at(row: int, column: int) -> float:
        place = column // 8 * 8 + AWQ_PLACES[column % 8]
        member = row // size
        return (number_at(numbers[row], place, 4) - number_at(zeros[member], place, 4)) * scales[member][column]

    return torch.tensor([[at(row, column) for row in range(len(numbers))] for column in range(len(scales[0]))])


def gptq(weight: Tensor, group: int | None, bits: int, less: int, *, order: bool) -> Stored:
    numbers, zeros, scales, members = numbered(weight, bits, group, order=order)
    return {
        "qweight": words(numbers, bits).t(),
        "qzeros": words([[zero - less for zero in row] for row in turned(zeros)], bits),
        "scales": torch.tensor(turned(scales)).half(),
        "g_idx": torch.tensor(members[0], dtype=torch.int32),
    }


def of_gptq(stored: Mapping[str, Tensor], group: int | None, bits: int, less: int, *, order: bool) -> Tensor:
    numbers, zeros, scales, members = (
        tensor.tolist() for tensor in (stored["qweight"].t(), stored["qzeros"], stored["scales"], stored["g_idx"])
    )

    def at(output: int, place: int) -> float:
        member = members[place]
        zero = number_at(zeros[member], output, bits) + less
        return (number_at(numbers[output], place, bits) - zero) * scales[member][output]

    return torch.tensor([[at(output, place) for place in range(len(members))] for output in range(len(numbers))])


def packed(weight: Tensor, group: int | None, bits: int, *, order: bool, zeros: bool) -> Stored:
    """Numbers and zeros are signed, and stored with half their range added: just what is not signed."""
    numbers, of_groups, scales, members = numbered(weight, bits, group, order=order)
    stored = {
        "weight_packed": words(numbers, bits),
        "weight_scale": torch.tensor(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        stored["weight_zero_point"] = words(turned(of_groups), bits).t()
    if order:
        stored["weight_g_idx"] = torch.tensor(members[0], dtype=torch.int32)
    return stored


def of_packed(stored: Mapping[str, Tensor], group: int | None, bits: int, *, order: bool, zeros: bool) -> Tensor:
    numbers, scales = stored["weight_packed"].tolist(), stored["weight_scale"].tolist()
    of_groups = stored["weight_zero_point"].t().tolist() if zeros else None
    outputs, inputs = stored["weight_shape"].tolist()
    size = group or inputs
    members = stored["weight_g_idx"].tolist() if order else [place // size for place in range(inputs)]

    def at(output: int, place: int) -> float:
        member = members[place]
        zero = 2 ** (bits - 1) if of_groups is None else number_at(of_groups[member], output, bits)
        return (number_at(numbers[output], place, bits) - zero) * scales[output][member]

    return torch.tensor([[at(output, place) for place in range(inputs)] for output in range(outputs)])


def int8(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
