"""The parts of a decoder, as values without tensors: a family describes itself, `CausalLM` computes them all.

From a `DecoderSpec` follow the weights that are read, what each rank has of them, and the shapes of all products.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Outputs of a linear layer in a checkpoint: all rows of the tensors called `name`, or what one projection has of
    rows that several share.
    """

    name: str  # without `.weight`
    first: int = 0
    of: int | None = None  # rows that are stored in all; None: only these
    every: int = 1  # these are every so manyth, from the first on
    run: int = 1  # and with each so many that follow it, its own included: those of a head, where heads stand together


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm (Zhang and Sennrich, 2019), or layer norm without a bias (Ba et al., 2016)."""

    name: str | None  # of the stored weight; None: it is all one
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
    turning_pairs: int = 0  # of proportional: the first ones of a head


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries that grow with their position, so that long contexts do not flatten the softmax (Nakanishi, 2025):
    multiplied by 1 + attn_scale * log(1 + (position + first) // floor_scale).
    """

    floor_scale: int  # tokens
    attn_scale: float
    first: int = 1  # what positions are counted from: 0 or 1


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
    chunk: int | None = None  # contexts are cut into so many tokens, of which a query sees those of its own alone
    temperature: TemperatureSpec | None = None  # of queries
    softcap: float | None = None  # scores are softcap * tanh(score / softcap)
    sinks: str | None = None  # a tensor: of each head a score that takes part in the softmax and has no value
    gate: StoredRows | None = None  # as wide as queries: what a head attends to is multiplied with its sigmoid

    @property
    def score_scale(self) -> float:
        """Of scores, before their softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def shares_values(self) -> bool:
        """Return whether values are read out of the keys, and only these are in the cache."""
        return False

    def num_weights(self, hidden_size: int) -> int:
        """Numbers that a token is multiplied with."""
        gates = 0 if self.gate is None else self.num_heads
        return hidden_size * (2 * (self.num_heads + self.num_kv_heads) + gates) * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads are made of one vector, the
    latent, beside which each token has one key that is rotated.

    What is in the cache is one head: the rotated key, then the latent. Queries meet the latent as it is,
    or it is brought to keys and values.
    """

    num_heads: int
    rank: int  # of the latent
    rotated_dims: int  # of queries and keys
    plain_dims: int
    value_dims: int
    query: StoredRows  # of hidden states, or of `query_down`'s
    down: StoredRows  # latent, then rotated key
    down_norm: NormSpec  # of the latent
    up: StoredRows  # of each head plain key, then value, out of the latent
    output: StoredRows
    rope: RopeSpec | None  # of `rotated_dims`, the first of a head
    query_down: StoredRows | None = None
    query_norm: NormSpec | None = None  # of what `query_down` gives
    query_rank: int = 0
    has_bias: bool = False  # of `down` and `query_down`
    has_output_bias: bool = False
    scale: float | None = None  # of scores; None: 1 / sqrt(dimensions of a query)

    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None
    temperature: ClassVar[TemperatureSpec | None] = None
    softcap: ClassVar[float | None] = None
    sinks: ClassVar[str | None] = None
    shares_values: ClassVar[bool] = True

    @property
    def head_dim(self) -> int:
        """Numbers in the cache for each token."""
        return self.rotated_dims + self.rank

    @property
    def query_dims(self) -> int:
        """Of a head, as it is stored."""
        return self.rotated_dims + self.plain_dims

    @property
    def has_paired_dims(self) -> bool:
        """Rotated dimensions that turn against each other stand side by side as they are stored."""
        return self.rope is not None and self.rope.is_paired

    @property
    def score_scale(self) -> float:
        """Of scores, before their softmax."""
        return self.query_dims**-0.5 if self.scale is None else self.scale

    def num_weights(self, hidden_size: int) -> int:
        """As `AttentionSpec.num_weights`."""
        queries, values = self.num_heads * self.query_dims, self.num_heads * self.value_dims
        of_queries = (hidden_size + queries) * self.query_rank if self.query_rank else hidden_size * queries
        up = self.num_heads * (self.plain_dims + self.value_dims) * self.rank
        return of_queries + hidden_size * (self.head_dim + values) + up


AnyAttentionSpec: TypeAlias = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True, slots=True)
class DeltaRuleSpec:
    """The gated delta rule (Yang et al., "Gated Delta Networks", 2024): each value head keeps a matrix, which a token
    makes smaller, corrects where its key points, and reads with its query. Queries, keys and values come through a
    causal convolution of each channel.

    A key head and its query are those of `num_value_heads / num_key_heads` value heads that follow each other.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head, as the next
    value_dim: int
    conv_width: int  # tokens that a channel sees, the newest included
    query: StoredRows
    key: StoredRows
    value: StoredRows
    gate: StoredRows  # as wide as values: what is read is normalised and multiplied with its silu
    beta: StoredRows  # a number for each value head: its sigmoid is the strength of a correction
    decay: StoredRows  # likewise: the matrix becomes smaller by exp(-exp(rate) * softplus(decay + bias))
    decay_rate: str  # a tensor of a number for each value head, as the next
    decay_bias: str
    conv: str  # of a linear layer, without `.weight`: [queries, keys and values, 1, conv_width]
    norm: NormSpec  # of what each value head reads
    output: StoredRows

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        """As `AttentionSpec.num_weights`."""
        values = self.num_value_heads * self.value_dim
        return hidden_size * (self.num_channels + 2 * values + 2 * self.num_value_heads)


@dataclass(frozen=True, slots=True)
class GatedMLPSpec:
    """Gated feed-forward block (SwiGLU, GEGLU; Shazeer, 2020)."""

    size: int
    gate: StoredRows
    up: StoredRows
    down: StoredRows
    has_bias: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"  # the last: of experts alone

    def num_weights(self, hidden_size: int) -> int:
        """As `AttentionSpec.num_weights`."""
        return hidden_size * 3 * self.size


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
    num_chosen_groups: int = 1  # by the best scores in each
    num_group_scores: int = 2  # that are added up for a group: one or two
    has_bias: bool = False
    weighs_inputs: bool = False  # an expert's weight is that of its input, not of what it gives

    @property
    def is_by_logits(self) -> bool:
        """Return whether the choice is that of the largest logits: sigmoids of large ones are all 1."""
        return self.score == "sigmoid" and self.correction is None and self.num_groups == 1


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

    def num_weights(self, hidden_size: int) -> int:
        """As `AttentionSpec.num_weights`: those of the chosen experts."""
        shared = self.shared.num_weights(hidden_size) if self.shared is not None else 0
        return hidden_size * self.count + self.router.top_k * self.each.num_weights(hidden_size) + shared


Mixer: TypeAlias = AnyAttentionSpec | DeltaRuleSpec | GatedMLPSpec | ExpertsSpec


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
    def attentions(self) -> tuple[AnyAttentionSpec, ...]:
        """Of all layers, in order: those that have keys and values in the cache."""
        return tuple(mixer for mixer in self._mixers if isinstance(mixer, AnyAttentionSpec))

    @property
    def delta_rules(self) -> tuple[DeltaRuleSpec, ...]:
        """Of all layers, in order: those that keep a state."""
        return tuple(mixer for mixer in self._mixers if isinstance(mixer, DeltaRuleSpec))

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
        return sum(mixer.num_weights(self.hidden_size) for mixer in self._mixers)

    @property
    def _mixers(self) -> tuple[Mixer, ...]:
        return tuple(mixer for layer in self.layers for sublayer in layer for mixer in sublayer.mixers)
