"""The interface of attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from worker_svc.core.batch import Batch
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.kernels.linear.unscaled import Unscaled
from worker_svc.core.models.spec import LatentAttentionSpec, TemperatureSpec
from worker_svc.core.operations.interface import Norm

if TYPE_CHECKING:  # these are made of what is here
    from worker_svc.core.layers.rotary import RotaryEmbedding
    from worker_svc.core.states.interface import StepStates


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head's query and key before they are rotated, each with a weight of head_dim."""

    query: Norm
    key: Norm


class LatentLayer(Protocol):
    """Latent attention's heads on this rank."""

    spec: LatentAttentionSpec
    up: Tensor  # keys and values out of the latent, [heads, plain_dims + value_dims, rank]

    @property
    def norm(self) -> Norm:
        """The norm of the latent."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The attention of some layers, beside their heads."""

    rotary: "RotaryEmbedding"
    scale: float  # of scores
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    has_sinks: bool = False  # see `StepAttention.attend`
    chunk: int | None = None  # contexts are cut into so many tokens, of which a query sees those of its own alone
    temperature: TemperatureSpec | None = None  # of queries
    latent: LatentShape | None = None  # keys and values are made of it; None: heads have their own

    @property
    def is_plain(self) -> bool:
        """Return whether all before a query is seen, by its scores as they are, and nothing else, as values that are
        no keys.
        """
        is_seen = self.window is None and self.chunk is None
        is_as_it_is = self.temperature is None and self.softcap is None and not self.has_sinks
        return is_seen and is_as_it_is and self.latent is None


class StepAttention(Protocol):
    """Attention of one step's batch; handed to the model as an argument."""

    @property
    def positions(self) -> Tensor:
        """i64[tokens]: the index of each token in its sequence."""

    @property
    def states(self) -> "StepStates | None":
        """For layers that keep a state instead of keys and values; None: no layer does."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: HeadNorms | None,
        unscaled: Unscaled | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Scale the rows of qkv (if `unscaled`), normalise (if `head_norms`) and rotate queries and keys, write keys
        and values to the cache of `layer`, then attend causally over each context.

        qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim]: query, key and value heads one after the other; it may
        be overwritten -> [tokens, num_heads * head_dim]. sinks [num_heads]: scores that take part in each head's
        softmax and have no value.
        """

    def attend_latents(self, layer: int, queries: Tensor, down: Tensor, weights: LatentLayer) -> Tensor:
        """Normalise latents, rotate what is rotated, write latents and rotated keys to the cache of `layer`, then
        attend causally over each context, to keys and values that `weights` make of latents.

        queries [tokens, heads * (plain_dims + rotated_dims)], down [tokens, rank + rotated_dims]: the latent, then the
        key's rotated dimensions -> [tokens, heads * value_dims]
        """


class AttentionBackend(Protocol):
    """Made once for a KV cache; what a step needs is prepared once, not once a layer."""

    def prepare(
        self, batch: Batch, positions: Tensor, slot_mappings: Sequence[Tensor], block_tables: Sequence[Tensor]
    ) -> StepAttention:
        """The attention of `batch`; never waits for the device.

        positions and, by kind of layers as in the cache, slot_mappings i64[tokens] and block_tables i32[slots,
        max_blocks] (by slot) are on the device. Entries of blocks that a window has left are never read.
        """
