"""The calls of cuBLASLt, on any machine: what a library is asked for that pretends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from worker_svc.core.kernels.linear import fp8_sums
from worker_svc.core.kernels.linear.fp8_sums import Fp8Sums

HEURISTIC, MATMUL = "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"


class Library:
    """Does nothing; every call has status 0 unless another one is said."""

    def __init__(self, num_found: int = 1, **statuses: int) -> None:
        self.calls: list[str] = []
        self._num_found = num_found
        self._statuses = statuses

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == HEURISTIC:
                arguments[-1]._obj.value = self._num_found
            return self._statuses.get(name, 0)

        return call


def sums(monkeypatch: pytest.MonkeyPatch, library: Library) -> Fp8Sums:
    monkeypatch.setattr(fp8_sums, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    made = Fp8Sums(torch.device("cpu"))
    made.__dict__["is_there"] = True
    return made


def aligned(dtype: torch.dtype, *shape: int) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    room = torch.zeros(num_bytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + num_bytes].view(dtype).view(shape)


def operands(rows: int, outputs: int = 64, inputs: int = 32) -> list[Tensor]:
    float8, float32 = torch.float8_e4m3fn, torch.float32
    sizes = (torch.bfloat16, rows, outputs), (float8, rows, inputs), (float32, rows, 1), (float8, outputs, inputs)
    return [aligned(*each) for each in (*sizes, (float32, outputs, 1))]


def test_a_shape_s_algorithm_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    made, some, others = sums(monkeypatch, library), operands(300), operands(301)
    for each in (some, others, some):
        assert made.add(*each) is each[0]
    assert (library.calls.count(HEURISTIC), library.calls.count(MATMUL)) == (2, 3)


def test_what_is_made_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sums, not when somebody collects garbage."""
    library = Library()
    made = sums(monkeypatch, library)
    made.add(*operands(300))
    created, destroyed = (sum(name.endswith(end) for name in library.calls) for end in ("Create", "Destroy"))
    assert created - destroyed == 3  # the handle, the product, the preference
    before = len(library.calls)
    del made
    assert sorted(library.calls[before:]) == [
        "cublasLtDestroy",
        "cublasLtMatmulDescDestroy",
        "cublasLtMatmulPreferenceDestroy",
    ]


@pytest.mark.parametrize("library", [Library(num_found=0), Library(**{HEURISTIC: 15})], ids=["none", "not supported"])
def test_what_has_no_algorithm_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    made = sums(monkeypatch, library)
    assert made.add(*operands(300)) is None
    assert MATMUL not in library.calls


@pytest.mark.parametrize("name", [HEURISTIC, MATMUL, "cublasLtCreate"])
def test_a_call_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    made = sums(monkeypatch, Library(**{name: 13}))
    with pytest.raises(RuntimeError, match=f"^{name} of cuBLASLt failed with status 13$"):
        made.add(*operands(300))


@pytest.mark.parametrize("odd", range(5))
def test_what_is_not_aligned_is_not_given_to_it(monkeypatch: pytest.MonkeyPatch, odd: int) -> None:
    library = Library()
    made, given = sums(monkeypatch, library), operands(300)
    room = aligned(torch.uint8, given[odd].nbytes + 16)
    given[odd] = room[16:].view(given[odd].dtype).view(given[odd].shape)
    assert made.add(*given) is None
    assert not library.calls


def test_other_precisions_and_odd_sizes_are_not_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    made, half = sums(monkeypatch, library), operands(300)
    half[0] = aligned(torch.float16, *half[0].shape)
    assert made.add(*half) is None
    assert made.add(*operands(300, outputs=72)) is None
    assert made.add(*operands(300, inputs=24)) is None
    assert not library.calls
