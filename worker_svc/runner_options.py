"""The options of a runner."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """The model to load and the memory to use."""

    model: str  # a local directory or a hub id
    revision: str | None = None  # of a hub id
    tokenizer: str | None = None  # a directory or a hub id, of what grammars are made of; None: the model's
    dtype: str = "auto"  # auto: as stored, but float32 on a CPU
    kv_cache_dtype: str = "auto"  # auto: as is computed; fp8, fp8_e4m3: 8-bit floats with fixed scales
    device: str = "auto"  # auto: cuda if there is one
    block_size: int = 16  # tokens
    max_num_seqs: int | None = None  # None: as suits the memory
    num_saved_states: int | None = None  # where layers keep one; None: one for each slot, as suits the memory
    max_model_len: int | None = None  # None: the model's context, as far as the KV cache reaches
    max_num_batched_tokens: int | None = None  # None: as suits model and device
    num_blocks: int | None = None  # None: from the memory
    kv_cache_memory_bytes: int | None = None  # None: modest on a CPU, what is free on CUDA
    gpu_memory_utilization: float = 0.9  # of the device's memory, weights included
    rank: int = 0
    world_size: int = 1
    distributed_address: str = "tcp://127.0.0.1:29500"  # where tensor-parallel ranks meet
    quantization: str | None = None  # fp8: of a dense checkpoint; None: as it is stored
    trust_remote_code: bool = False
    attention: str = "auto"  # auto, torch, triton
    prefill_attention: str = "auto"  # of long chunks of prompts: auto, triton, flash_attn
    tuning: str | None = None  # file of a table of products; None: the card's own in the cache, if it is there
    cuda_graphs: bool = True  # of decode steps, where Triton's kernels compute
    chunk_graphs: bool = True  # where there are those, also of small steps with chunks of prompts
    model_impl: str = "auto"  # auto, penstock, transformers: see `find_loader`
    load_format: str = "auto"  # dummy: random weights
