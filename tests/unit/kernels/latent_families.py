"""Configurations of families with latent attention, beside `FIELDS` of `runner_configs`, and what their steps
choose.
"""

from typing import Any

import pytest

from worker_svc.core.attention import chunk_work
from worker_svc.core.attention.chunk_work import LatentForm
from worker_svc.core.batch import Batch
from worker_svc.core.slots import I64

DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": None,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 40,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
}


def expand_short_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let steps of any number of tokens bring contexts to heads where that is less arithmetic; the list that is
    returned hears of each step whether it did.
    """
    choices: list[bool] = []
    columns_of = LatentForm.columns

    def columns(form: LatentForm, batch: Batch, first: int) -> list[I64]:
        columns = columns_of(form, batch, first)
        choices.append(len(columns[4]) > 0)
        return columns

    monkeypatch.setattr(chunk_work, "_FEWEST_EXPANDED", 1)
    monkeypatch.setattr(LatentForm, "columns", columns)
    return choices
