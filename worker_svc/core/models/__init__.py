"""The model families, a file each: a function from a checkpoint's fields to what its decoder is made of."""

from collections.abc import Callable

from worker_svc.core.models.config_fields import ConfigFields
from worker_svc.core.models.granite import granite
from worker_svc.core.models.llama import llama
from worker_svc.core.models.mistral import mistral
from worker_svc.core.models.olmo2 import olmo2
from worker_svc.core.models.phi3 import phi3
from worker_svc.core.models.qwen2 import qwen2
from worker_svc.core.models.qwen3 import qwen3
from worker_svc.core.models.spec import DecoderSpec

FAMILIES: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "GraniteForCausalLM": granite,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Olmo2ForCausalLM": olmo2,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
