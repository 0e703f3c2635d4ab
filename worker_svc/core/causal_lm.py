"""The decoder that a `DecoderSpec` describes, of any family: token ids to hidden states, and these to logits."""

import copy
from itertools import count
from typing import Self

import torch
from torch import Tensor

from contract.domain.kv_kinds import Reach
from worker_svc.core.attention.interface import AttentionKind, StepAttention
from worker_svc.core.kernels.attention.latent_shape import LatentShape
from worker_svc.core.layers.embedding import VocabParallelEmbedding
from worker_svc.core.layers.fusion import operand
from worker_svc.core.layers.norm import make_norm
from worker_svc.core.layers.placement import Placement
from worker_svc.core.layers.rotary import RotaryEmbedding
from worker_svc.core.layers.sublayer import Sublayer
from worker_svc.core.models.spec import (
    AnyAttentionSpec,
    DecoderSpec,
    DeltaRuleSpec,
    LatentAttentionSpec,
    SublayerSpec,
)


class CausalLM:
    """This rank's part; the weights are not yet loaded: `placement.wanted` then says which it wants."""

    def __init__(self, spec: DecoderSpec, placement: Placement, max_model_len: int) -> None:
        self.spec = spec
        self.group = placement.group
        rotaries = {
            rope: RotaryEmbedding(rope, spec.attentions[0].head_dim, max_model_len, placement.device)
            for rope in dict.fromkeys(attention.rope for attention in spec.attentions)
        }
        self.attentions = [_kind_of(each, rotaries[each.rope], max_model_len) for each in spec.attentions]
        # Rounded like all that it is multiplied with, as the models' makers have it.
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(placement.dtype).item()
        self._embedding = VocabParallelEmbedding(placement, spec.embedding, spec.vocab_size, spec.hidden_size)
        attentions, states = iter(enumerate(self.attentions)), count()
        self._kinds: list[AttentionKind | None] = []  # by layer; None: it keeps a state
        self._layers: list[list[Sublayer]] = []
        for layer in spec.layers:
            number, kind = (next(states), None) if _keeps_state(layer) else next(attentions)
            rotary = None if kind is None else kind.rotary
            self._kinds.append(kind)
            self._layers.append([Sublayer(placement, each, spec.hidden_size, number, rotary) for each in layer])
        self._norm = make_norm(placement, spec.norm, spec.hidden_size)
        self._head = self._embedding
        if not spec.is_tied:
            self._head = VocabParallelEmbedding(placement, spec.head, spec.vocab_size, spec.hidden_size, is_head=True)

    @property
    def vocab_size(self) -> int:
        """Implement `LanguageModel.vocab_size`."""
        return self.spec.vocab_size

    @property
    def num_layer_weights(self) -> int:
        """Implement `LanguageModel.num_layer_weights`."""
        return self.spec.num_layer_weights // self.group.world_size

    def outline(self) -> Self:
        """The same weights, of the last layer and the first of each kind: what they launch is all that any does."""
        outline = copy.copy(self)
        kinds = list(zip(self._kinds, map(_mixers_of, self.spec.layers), strict=True))
        first_of_kinds = {kind: number for number, kind in reversed(list(enumerate(kinds)))}
        numbers = sorted({*first_of_kinds.values(), len(self._layers) - 1})
        outline._layers = [self._layers[number] for number in numbers]
        return outline

    @torch.inference_mode()
    def prepare(self) -> None:
        """Bring the weights into the form in which they are multiplied; once, when they are there."""
        for layer in self._layers:
            for sublayer in layer:
                sublayer.prepare()
        self._norm.prepare()
        self._norm.weight.mul_(self.spec.logits_scale)

    def forward(self, token_ids: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """token_ids i64[tokens] -> hidden states [tokens, hidden_size], not yet normalised; given `rows` i64[n], those
        alone [n, hidden_size]: what the last layer does after its keys and values is done for them only.
        """
        return self.transform(self.embed(token_ids), attention, rows)

    @property
    def embedding_table(self) -> Tensor | None:
        """[at least vocab_size, hidden_size], where this rank has all of it: `embed` is to look up its rows then."""
        return self._embedding.table

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids i64[tokens] -> [tokens, hidden_size]."""
        return self._embedding.embed(token_ids)

    def transform(self, hidden: Tensor, attention: StepAttention, rows: Tensor | None = None) -> Tensor:
        """As `forward`, of embedded tokens."""
        if self.spec.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        for layer in self._layers[:-1]:
            for sublayer in layer:
                hidden = sublayer(hidden, attention)
        for sublayer in self._layers[-1]:
            hidden = sublayer(hidden, attention, rows)
        return hidden

    def normalized(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of `forward` -> f32[rows, hidden_size], as transformers' last hidden state."""
        x, norm = operand(self._norm(hidden.float()))
        normalized = x if norm is None else norm.normalize(x)
        return normalized if self.spec.logits_scale == 1.0 else normalized / self.spec.logits_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden_size] of `forward` -> [rows, vocab_size], the same on every rank."""
        logits, softcap = self._head.logits(self._norm(hidden)), self.spec.logits_softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _mixers_of(layer: tuple[SublayerSpec, ...]) -> tuple[type, ...]:
    return tuple(type(mixer) for sublayer in layer for mixer in sublayer.mixers)


def _keeps_state(layer: tuple[SublayerSpec, ...]) -> bool:
    return any(isinstance(mixer, DeltaRuleSpec) for sublayer in layer for mixer in sublayer.mixers)


def reach_of(attention: AnyAttentionSpec, max_model_len: int) -> Reach:
    """The tokens that a query sees."""
    return Reach(_bound(attention.window, max_model_len), _bound(attention.chunk, max_model_len))


def _kind_of(attention: AnyAttentionSpec, rotary: RotaryEmbedding, max_model_len: int) -> AttentionKind:
    reach = reach_of(attention, max_model_len)
    return AttentionKind(
        rotary,
        attention.score_scale,
        window=reach.window,
        softcap=attention.softcap,
        has_sinks=attention.sinks is not None,
        chunk=reach.chunk,
        temperature=attention.temperature,
        latent=_latent_of(attention) if isinstance(attention, LatentAttentionSpec) else None,
    )


def _latent_of(attention: LatentAttentionSpec) -> LatentShape:
    return LatentShape(
        plain=attention.plain_dims,
        values=attention.value_dims,
        rank=attention.rank,
        rotated=attention.rotated_dims,
        is_paired=attention.has_paired_dims,
    )


def _bound(tokens: int | None, max_model_len: int) -> int | None:
    """A window or chunk that no context exceeds is none."""
    return tokens if tokens is not None and tokens < max_model_len else None
