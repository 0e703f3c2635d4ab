"""Logprobs of a step's tokens, from the columns that come down to those of its result."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.domain.plan import Logprobs
from worker_svc.core.slots import I64

Column = npt.NDArray[Any]


def pack_logprobs(num_logprobs: I64, chosen: Mapping[int, I64], columns: Sequence[Column]) -> Logprobs:
    """Rows that asked stand in the columns own and ranks [l] and the tops [l, most], those of `chosen` in a last one
    [c, most]; `num_logprobs` i64[rows] is -1 for the others.
    """
    own, own_ranks, top_ids, top_logprobs, *of_chosen = columns
    asked = num_logprobs >= 0
    sampled, ranks = np.full(len(num_logprobs), np.nan, np.float32), np.zeros(len(num_logprobs), np.uint32)
    sampled[asked], ranks[asked] = own, own_ranks
    counts = np.maximum(num_logprobs, 0)
    if chosen:
        ids, values = _with_chosen(counts, np.cumsum(asked) - 1, chosen, (top_ids, top_logprobs, *of_chosen))
        counts[list(chosen)] = [len(each) for each in chosen.values()]
        return Logprobs(sampled, ranks, counts.astype(np.uint32), ids.astype(np.uint32), values)
    kept = np.arange(top_ids.shape[1]) < counts[asked][:, None]
    return Logprobs(sampled, ranks, counts.astype(np.uint32), top_ids[kept].astype(np.uint32), top_logprobs[kept])


def _with_chosen(
    counts: I64, places: I64, chosen: Mapping[int, I64], columns: Sequence[Column]
) -> tuple[Column, Column]:
    """The alternatives of all rows, one row after the other: ids, and f32 their logprobs."""
    top_ids, top_logprobs, of_chosen = columns
    ids, values, taken = [], [], 0
    for row, count in enumerate(counts.tolist()):
        if (wanted := chosen.get(row)) is not None:
            ids.append(wanted)
            values.append(of_chosen[taken, : len(wanted)])
            taken += 1
        elif count:
            ids.append(top_ids[places[row], :count])
            values.append(top_logprobs[places[row], :count])
    return np.concatenate(ids), np.concatenate(values)
