"""Granite 3 MoE (IBM, 2024): Granite with a mixture of experts in every layer, stored as stacked tensors."""

from typing import Any

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.granite import granite_decoder
from worker_svc.core.models.parts import experts
from worker_svc.core.models.spec import DecoderSpec, ExpertsSpec, GatedMLPSpec, StoredRows


def granite_moe(fields: ConfigFields) -> DecoderSpec:
    """A mixture in every layer."""
    return granite_decoder(fields, lambda number: granite_mixture(fields, number))


def granite_mixture(fields: ConfigFields, layer: int, **changes: Any) -> ExpertsSpec:
    """The weights of the chosen experts are the softmax of their logits alone: as if those of all were renormalised."""
    count, size = fields.count("num_local_experts"), fields.count("intermediate_size")
    name = f"model.layers.{layer}.block_sparse_moe"
    both, down = f"{name}.input_linear", StoredRows(f"{name}.output_linear")
    each = GatedMLPSpec(size, StoredRows(both, 0, 2 * size), StoredRows(both, size, 2 * size), down)
    router = {"name": f"{name}.router.layer", "renormalizes": True}
    return experts(fields, layer, count=count, size=size, router=router, each=each, layout="stacked", **changes)
