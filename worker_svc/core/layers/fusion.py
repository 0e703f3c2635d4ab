"""The paper's words as values that are not computed yet: what reads them decides in which kernel they are.

`q, k, v = qkv(norm(x))`, `activate(gate) * up` and `hidden + down(x)` are written as in a paper. A norm waits for the
product after it, a product for the norms and the rotation of its heads, for its gate, or for the sum that it goes
into, a gate for the product after it; then one of `Operations` does all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from worker_svc.core.attention.interface import HeadNorms, StepAttention
from worker_svc.core.operations.interface import Activation

if TYPE_CHECKING:  # these make what is here
    from worker_svc.core.layers.linear import Linear
    from worker_svc.core.layers.norm import RMSNorm
    from worker_svc.core.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """norm(hidden): hidden [tokens, size]."""

    hidden: Tensor
    norm: "RMSNorm"


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """linear(x), then normalised if `after` says so."""

    linear: "Linear"
    x: "Tensor | Normed | Gated"  # [tokens, inputs]
    after: "RMSNorm | None" = None

    def __iter__(self) -> Iterator["Projected"]:
        """Its projections, in the order of the linear layer's."""
        return (Projected(self, number) for number in range(len(self.linear.sizes)))

    def __radd__(self, residual: Tensor) -> Tensor:
        """residual + this, like `residual`, which may be overwritten by it."""
        x, linear, after = self.x, self.linear, self.after
        assert not isinstance(x, Normed), "a product that is added reads no norm"
        if isinstance(x, Tensor):
            return linear.operations.linear_add(x, linear, residual, after)
        return linear.operations.norm_gated_add(*x.operands(), down=linear, residual=residual, after=after)


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """activation(gate) * up, the projections of a product."""

    product: Product
    activation: Activation

    def operands(self) -> "tuple[Tensor, RMSNorm | None, Linear, Activation]":
        """The operands of `Operations.norm_gated`."""
        return *operand(self.product.x), self.product.linear, self.activation

    def compute(self) -> Tensor:
        """-> [tokens, outputs / 2]."""
        return self.product.linear.operations.norm_gated(*self.operands())


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """One projection of a product, and what is to become of it."""

    product: Product
    number: int
    norm: "RMSNorm | None" = None
    rotary: "RotaryEmbedding | None" = None
    activation: Activation | None = None

    def __mul__(self, other: "Projected") -> Gated:
        """activation(gate) * up."""
        product = self.product
        assert self.activation is not None, "a gate is activated"
        assert (other.product, self.number, other.number) == (product, 0, 1), "gate and up are one product"
        return Gated(product, self.activation)


def operand(x: Tensor | Normed | Gated) -> tuple[Tensor, "RMSNorm | None"]:
    """The input of a product and the norm that is taken of it first."""
    assert not isinstance(x, Gated), "a product of what is gated is added"
    return (x.hidden, x.norm) if isinstance(x, Normed) else (x, None)


def activate(gate: Projected, activation: Activation) -> Projected:
    """silu(x) is x * sigmoid(x), gelu_tanh(x) about x times the normal distribution (Hendrycks and Gimpel, 2016)."""
    return replace(gate, activation=activation)


def attend(
    attention: StepAttention,
    layer: int,
    q: Projected,
    k: Projected,
    v: Projected,
    *,
    sinks: Tensor | None = None,
    gate: Projected | None = None,
) -> Tensor:
    """softmax(q k^T) v over the context of each token, whose keys and values go to the cache of `layer`, times
    sigmoid(gate) if there is one; sinks: see `StepAttention.attend`.

    -> [tokens, num_heads * head_dim]
    """
    product = q.product
    assert k.product is product, "queries, keys and values are one product"
    assert (v.product, v.norm, v.rotary) == (product, None, None), "values are neither normalised nor rotated"
    assert q.rotary is not None, "queries and keys are rotated"
    assert q.rotary is k.rotary
    linear, operations = product.linear, product.linear.operations
    if gate is not None:
        assert gate.product is product, "a gate is of the same product"
        assert q.norm is not None, "heads that are gated have norms"
        assert k.norm is not None
        everything = operations.norm_linear(*operand(product.x), linear)
        num_gates = linear.sizes[-1]
        # Kernels read rows that follow each other.
        qkv = everything[:, :-num_gates].contiguous()
        attended = attention.attend(layer, qkv, HeadNorms(q.norm, k.norm), None, sinks)
        return operations.sigmoid_gated(attended, everything[:, -num_gates:])
    if q.norm is None or k.norm is None or q.norm.is_of_head:
        norms = HeadNorms(q.norm, k.norm) if q.norm is not None and k.norm is not None else None
        qkv, unscaled = operations.norm_linear_unscaled(*operand(product.x), linear)
        return attention.attend(layer, qkv, norms, unscaled, sinks)
    # Norms of whole projections are taken here, and their eps is one of scaled rows.
    qkv = operations.norm_linear(*operand(product.x), linear)
    queries, keys = qkv[:, : linear.sizes[0]], qkv[:, linear.sizes[0] : sum(linear.sizes[:2])]
    queries.copy_(operations.norm(queries, q.norm))
    keys.copy_(operations.norm(keys, k.norm))
    return attention.attend(layer, qkv, None, None, sinks)
