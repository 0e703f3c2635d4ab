"""The parts of a decoder, as values without tensors: a family describes itself, `CausalLM` computes them all.

From a `DecoderSpec` follow the weights that are read, what each rank has of them, and the shapes of all products.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Outputs of a linear layer in a checkpoint: all rows of the tensors called `name`, or what one projection has of
    rows that several share.
    """

    name: str  # without `.weight`
    first: int = 0
    of: int | None = None  # rows that are stored in all; None: only these
    every: int = 1  # these are every so manyth, from the first on


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm (Zhang and Sennrich, 2019), or layer norm without a bias (Ba et al., 2016), with a stored weight."""

    name: str
    eps: float
    offset: float = 0.0  # is added to the stored weight
    is_centered: bool = False  # the mean is subtracted first: layer norm


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al., 2021): base, which dimensions turn, and how positions are stretched."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # of llama3, as the next
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # of llama3, yarn and longrope; of dynamic the model's positions
    dims: int | None = None  # of a head that turn, its first ones; None: all
    is_paired: bool = False  # neighbours turn against each other; else the halves do
    attention_factor: float = 1.0  # of cosines and sines
    beta_fast: float = 32.0  # of yarn, as the next two
    beta_slow: float = 1.0
    truncates: bool = True  # bounds of dimensions are whole numbers
    short_factors: tuple[float, ...] = ()  # of longrope, for each pair of dimensions, as the next
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (Ainslie et al., 2023)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query: StoredRows
    key: StoredRows
    value: StoredRows
    output: StoredRows
    rope: RopeSpec | None  # None: queries and keys are not rotated
    has_bias: bool = False  # of queries, keys and values
    has_output_bias: bool = False
    query_norm: NormSpec | None = None  # of each head before it is rotated, as the next
    key_norm: NormSpec | None = None
    norms_all_heads: bool = False  # these see all heads as one vector
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    sinks: str | None = None  # a tensor: of each head a score that takes part in the softmax and has no value

    @property
    def score_scale(self) -> float:
        """Of scores, before their softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def num_weights(self) -> int:
        """For each number of the hidden states, that a token is multiplied with."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """Gated feed-forward block (SwiGLU, GEGLU; Shazeer, 2020)."""

    size: int
    gate: StoredRows
    up: StoredRows
    down: StoredRows
    has_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"  # the last: of experts alone

    @property
    def num_weights(self) -> int:
        """As `AttentionSpec.num_weights`."""
        return 3 * self.size


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The choice of experts for a token, and the weights of what they give (Shazeer et al., 2017)."""

    name: str  # of a linear layer, without `.weight`
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"  # of each expert, out of its logit
    renormalizes: bool = False  # weights of the chosen sum to one
    scale: float = 1.0  # of the weights
    correction: str | None = None  # a tensor that is added to the scores for the choice alone (Wang et al., 2024)
    num_groups: int = 1  # of experts, one after the other: only those of the best groups can be chosen
    num_chosen_groups: int = 1  # by the two best scores in each
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Mixture of experts (Shazeer et al., 2017): the weighted sum of what some of many feed-forward blocks give, and of
    what a shared one does (DeepSeekMoE; Dai et al., 2024).
    """

    count: int
    router: RouterSpec
    each: GatedMLPSpec  # names have `{expert}`, or are those of stacked tensors
    # Stored one by one; in tensors [experts, outputs, inputs], or [experts, inputs, outputs] without `.weight`.
    layout: Literal["single", "stacked", "transposed"] = "single"
    shared: GatedMLPSpec | None = None
    shared_gate: str | None = None  # a linear layer of one output, whose sigmoid is the weight of the shared block

    @property
    def num_weights(self) -> int:
        """As `AttentionSpec.num_weights`: those of the chosen experts."""
        shared = self.shared.num_weights if self.shared is not None else 0
        return self.count + self.router.top_k * self.each.num_weights + shared


Mixer: TypeAlias = AttentionSpec | GatedMLPSpec | ExpertsSpec


@dataclass(frozen=True, slots=True)
class SublayerSpec:
    """hidden + scale * after(mixer(before(hidden))), without the norms that are None.

    Of several mixers, which read the same norm, the sum is added.
    """

    mixers: tuple[Mixer, ...]
    before: NormSpec | None
    after: NormSpec | None = None  # only of one mixer
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Embedding, layers, norm, head."""

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[SublayerSpec, ...], ...]
    norm: NormSpec
    is_tied: bool  # the head is the embedding
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float | None = None  # logits are softcap * tanh(logit / softcap), after their scale
    unused_prefixes: tuple[str, ...] = ()  # of tensors that a checkpoint may have and that the model does not

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of all layers, in order: those that have keys and values in the cache."""
        return tuple(mixer for mixer in self._mixers if isinstance(mixer, AttentionSpec))

    @property
    def mlps(self) -> tuple[GatedMLPSpec, ...]:
        """The feed-forward blocks that every token goes through, shared ones included, in order."""
        blocks = (mixer.shared if isinstance(mixer, ExpertsSpec) else mixer for mixer in self._mixers)
        return tuple(block for block in blocks if isinstance(block, GatedMLPSpec))

    @property
    def unused_tensors(self) -> frozenset[str]:
        """As `unused_prefixes`, by name."""
        return frozenset({f"{self.head}.weight"}) if self.is_tied else frozenset()

    @property
    def num_layer_weights(self) -> int:
        """Numbers that all layers multiply a token with."""
        return self.hidden_size * sum(mixer.num_weights for mixer in self._mixers)

    @property
    def _mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for layer in self.layers for sublayer in layer for mixer in sublayer.mixers)
