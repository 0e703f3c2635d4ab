"""Heads of latent attention, absorbed, and values out of what they attended to, by plain torch: the reference."""

import torch
from torch import Tensor

from worker_svc.core.attention.interface import LatentLayer
from worker_svc.core.models.spec import LatentAttentionSpec


def make_heads(queries: Tensor, down: Tensor, layer: LatentLayer) -> Tensor:
    """The heads, not yet rotated: queries brought to the latent, and the key, which is the latent, normalised; of each
    first the rotated and then the latent dimensions of one half, then of the other.

    queries and down: see `StepAttention.attend_latents` -> [tokens, (heads + 1) * head_dim]
    """
    spec, count = layer.spec, len(queries)
    plain, turned = torch.split(
        queries.reshape(count, len(layer.up), spec.query_dims), [spec.plain_dims, spec.rotated_dims], dim=-1
    )
    latent, key = torch.split(down, [spec.rank, spec.rotated_dims], dim=-1)
    met = torch.einsum("thp,hpr->thr", plain, layer.up[:, : spec.plain_dims])
    latents = torch.cat((met, layer.norm.normalize(latent).unsqueeze(1)), dim=1)
    rotated = torch.cat((turned, key.unsqueeze(1)), dim=1)
    return torch.cat((_halves(rotated, spec), latents.view(count, -1, 2, spec.rank // 2)), dim=-1).flatten(1)


def make_values(attended: Tensor, layer: LatentLayer) -> Tensor:
    """The values of what heads of `make_heads` attended to: attended [tokens, heads * head_dim], of which rotated
    dimensions may be anything -> [tokens, heads * value_dims].
    """
    spec = layer.spec
    heads = attended.reshape(len(attended), len(layer.up), 2, spec.head_dim // 2)
    latents = heads[..., spec.rotated_dims // 2 :].flatten(-2)
    return torch.einsum("thr,hvr->thv", latents, layer.up[:, spec.plain_dims :]).flatten(1)


def _halves(turned: Tensor, spec: LatentAttentionSpec) -> Tensor:
    """Dimensions that turn against each other, [..., 2, rotated_dims / 2]."""
    if spec.has_paired_dims:
        return turned.view(*turned.shape[:-1], -1, 2).transpose(-1, -2)
    return turned.view(*turned.shape[:-1], 2, -1)
