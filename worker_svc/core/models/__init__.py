"""The model families, a file each: a function from a checkpoint's fields to what its decoder is made of."""

from collections.abc import Callable

from worker_svc.core.models.cohere import cohere, cohere2
from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.deepseek import deepseek_v2, deepseek_v3
from worker_svc.core.models.exaone4 import exaone4
from worker_svc.core.models.gemma import gemma, gemma2, gemma3
from worker_svc.core.models.glm import glm, glm4
from worker_svc.core.models.glm4_moe import glm4_moe
from worker_svc.core.models.gpt_oss import gpt_oss
from worker_svc.core.models.granite import granite
from worker_svc.core.models.granite_hybrid import granite_hybrid
from worker_svc.core.models.granite_moe import granite_moe
from worker_svc.core.models.llama import llama
from worker_svc.core.models.llama4 import llama4
from worker_svc.core.models.minimax_m2 import minimax_m2
from worker_svc.core.models.mistral import ministral3, mistral
from worker_svc.core.models.mixtral import mixtral
from worker_svc.core.models.olmo2 import olmo2, olmo3
from worker_svc.core.models.olmoe import olmoe
from worker_svc.core.models.phi3 import phi3
from worker_svc.core.models.qwen2 import qwen2
from worker_svc.core.models.qwen2_moe import qwen2_moe
from worker_svc.core.models.qwen3 import qwen3
from worker_svc.core.models.qwen3_5 import qwen3_5, qwen3_5_moe
from worker_svc.core.models.qwen3_moe import qwen3_moe
from worker_svc.core.models.qwen3_next import qwen3_next
from worker_svc.core.models.seed_oss import seed_oss
from worker_svc.core.models.smollm3 import smollm3
from worker_svc.core.models.spec import DecoderSpec

FAMILIES: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Exaone4ForCausalLM": exaone4,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "Llama4ForCausalLM": llama4,
    "LlamaForCausalLM": llama,
    "Ministral3ForCausalLM": ministral3,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "MinistralForCausalLM": mistral,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
}
