"""Kernels of quack-kernels for Hopper that can ask for a weight's first tiles before the kernel ahead has ended, and
let the one after begin as soon as there is room. Only to be imported where that package is; kernels on disk are named
after `many_rows.VERSION`, so that other code here needs another number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
from cutlass import cute
from cutlass.experimental import primitives
from quack.epilogue.frontend import EpiMod


class _Ahead:
    """In front of a class of the package."""

    weight: str | None = None  # which operand it is, "A" or "B", if it is asked for ahead

    def make_ab_pipeline(self, *args: Any, **kwargs: Any) -> Any:
        if self.weight is not None:
            # The first that is called for a kernel's own code, which now waits for nothing but what `load_tma` does.
            self.use_pdl = False
        return super().make_ab_pipeline(*args, **kwargs)  # type: ignore[misc]

    def load_tma(self, *args: Any, **kwargs: Any) -> Any:
        """The work of the warp that asks for tiles."""
        if self.weight is None:
            return super().load_tma(*args, **kwargs)  # type: ignore[misc]
        return self._load_ahead(*args, **kwargs)

    @cute.jit
    def _load_ahead(
        self, pipeline: Any, state: Any, copies: Sequence[Callable[..., None]], count: Any, k_tile_start: Any = 0
    ) -> Any:
        rows, weight = (copies[1], copies[0]) if cutlass.const_expr(self.weight == "A") else (copies[0], copies[1])
        early = cutlass.Int32(0)
        if state.count == 0:
            early = cutlass.min(count, cutlass.Int32(self.ab_stage))  # type: ignore[attr-defined]
        ahead = state.clone()
        for k in cutlass.range(early, unroll=1):
            pipeline.producer_acquire(ahead)
            weight(k_tile_start + k, ahead.index, tma_bar_ptr=pipeline.producer_get_barrier(ahead))
            ahead.advance()
        primitives.griddepcontrol(primitives.GridDepAction.WAIT)
        primitives.griddepcontrol(primitives.GridDepAction.LAUNCH_DEPENDENTS)
        for k in cutlass.range(count, unroll=1):
            barrier = pipeline.producer_get_barrier(state)
            if k >= early:
                pipeline.producer_acquire(state)
                weight(k_tile_start + k, state.index, tma_bar_ptr=barrier)
            rows(k_tile_start + k, state.index, tma_bar_ptr=barrier)
            state.advance()
        return state


class End(EpiMod):  # type: ignore[misc]
    """The class that `gemm_epilogue` makes of a function, for such kernels."""

    def _mint(self, *key: Any) -> type:
        base = super()._mint(*key)
        made: dict[type, type] = self.__dict__.setdefault("_made", {})
        if base not in made:
            made[base] = type(f"{base.__name__}_ahead", (_Ahead, base), {"__module__": base.__module__})
        return made[base]
