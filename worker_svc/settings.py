"""Settings of a worker."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from servicekit.settings import ServiceSettings

_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(ServiceSettings):
    """Settings of `worker_svc`."""

    model: str = field(metadata={"help": "checkpoint directory or Hugging Face hub id"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a hub id"})
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "directory or hub id of the tokenizer, for structured outputs; none: the model's"},
    )
    runner: Literal["model", "simulated"] = field(
        default="model", metadata={"help": "model: the real one; simulated: fixed step time, deterministic tokens"}
    )
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata={"help": "what computes"})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", metadata={"help": "of weights and what is computed; auto: as stored, on a CPU float32"}
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = field(
        default="auto",
        metadata={
            "help": "of the KV cache; auto: dtype; fp8 or fp8_e4m3: 8-bit floats, times a scale for each layer that "
            "the checkpoint has (k_scale, v_scale), else 1"
        },
    )
    block_size: _Count = field(default=16, metadata={"help": "tokens of a KV block"})
    model_impl: Literal["auto", "penstock", "transformers"] = field(
        default="auto",
        metadata={
            "help": "whose model: penstock's own families, or transformers' own module over paged attention, which "
            "needs penstock[transformers]; auto: the latter where there is no family for the architecture"
        },
    )
    load_format: Literal["auto", "dummy"] = field(
        default="auto", metadata={"help": "auto: the checkpoint's weights; dummy: random ones, to measure speed"}
    )
    quantization: str | None = field(
        default=None,
        metadata={"help": "fp8: a dense checkpoint is rounded to 8-bit floats when it is read; none: as it is stored"},
    )
    attention: Literal["auto", "torch", "triton"] = field(
        default="auto",
        metadata={
            "help": "kernels, and always who attends for decoding sequences; auto: triton for half precision on CUDA "
            "and heads of 64-256 dimensions, torch for all else"
        },
    )
    prefill_attention: Literal["auto", "triton", "flash_attn"] = field(
        default="auto",
        metadata={
            "help": "of long chunks of prompts, where triton computes (torch always attends itself); auto: a "
            "FlashAttention package if installed, but only on a Hopper with heads of 64 or 128 and up to four queries "
            "of a key, where it was faster; "
            "else triton"
        },
    )
    tuning: str | None = field(
        default=None,
        metadata={
            "help": "file of a table that `penstock tune` wrote, where triton computes; none: the one that it wrote "
            "for this card in $XDG_CACHE_HOME/penstock/tuning, if it did"
        },
    )
    cuda_graphs: bool = field(
        default=True,
        metadata={"help": "record decode steps as CUDA graphs, where triton's kernels compute"},
    )
    chunk_graphs: bool = field(
        default=True,
        metadata={
            "help": "where decode steps are recorded, record steps with prompts as well, unless computing them takes "
            "longer than launching them"
        },
    )
    max_num_seqs: _Count | None = field(
        default=None,
        metadata={"help": "sequences at once, no more than max_num_batched_tokens; none: 256, or as KV memory allows"},
    )
    num_saved_states: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = field(
        default=None,
        metadata={
            "help": "where layers keep a state of each sequence: states that are saved for sequences with the same "
            "first tokens; none: as many as sequences at once, in at most an eighth of what weights and these leave; "
            "0: no prefix is found again"
        },
    )
    max_model_len: _Count | None = field(
        default=None, metadata={"help": "tokens of a sequence, prompt and output; none: the model's, as far as KV fits"}
    )
    max_num_batched_tokens: _Count | None = field(
        default=None, metadata={"help": "tokens that one step may compute; none: as suits the model and the device"}
    )
    num_blocks: _Count | None = field(default=None, metadata={"help": "KV blocks; none: what the memory holds"})
    kv_cache_memory_bytes: _Count | None = field(
        default=None, metadata={"help": "memory for KV; none: 256 MiB on a CPU, what is free on CUDA"}
    )
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = field(
        default=0.9, metadata={"help": "share of the GPU's memory to use, weights included"}
    )
    step_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = field(
        default=8.0, metadata={"help": "seconds after which a step that the device has not ended means that it hangs"}
    )
    rank: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=0, metadata={"help": "which tensor-parallel rank this process is"}
    )
    tensor_parallel_size: _Count = field(default=1, metadata={"help": "tensor-parallel ranks of this worker"})
    distributed_address: str = field(
        default="tcp://127.0.0.1:29500", metadata={"help": "where the ranks meet: tcp://host:port or file://path"}
    )
    num_threads: _Count | None = field(
        default=None,
        metadata={"help": "CPU threads of a step; none: on a CPU the cores it may use less one"},
    )
    home_shard: Annotated[int, msgspec.Meta(ge=0)] | None = field(
        default=None,
        metadata={"help": "shard of the token log for this worker's requests; none: its scheduler chooses"},
    )
    step_ms: Annotated[float, msgspec.Meta(ge=0)] = field(
        default=2.0, metadata={"help": "simulated: device time of a step"}
    )
    eos_every: Annotated[int, msgspec.Meta(ge=0)] = field(
        default=0, metadata={"help": "simulated: about one token in so many is EOS; 0: none is"}
    )
    simulated_window: _Count | None = field(
        default=None,
        metadata={"help": "simulated: tokens that three of four layers see, themselves included; none: all"},
    )
    simulated_state: bool = field(
        default=False,
        metadata={"help": "simulated: layers keep a state of each sequence"},
    )
    simulated_model: Literal["decoder", "encoder", "cross_encoder"] = field(
        default="decoder",
        metadata={"help": "simulated: what the model is; encoders compute prompts whole and generate nothing"},
    )
    simulated_seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = field(
        default=0, metadata={"help": "simulated: models with different ones give different tokens"}
    )
    script: Path | None = field(
        default=None,
        metadata={
            "help": 'simulated: file of answers, a JSON line {"match": text, "answer": text} each; the first line '
            "whose match is in the prompt has its answer, and where there is none tokens are drawn"
        },
    )
    die_on_token: Annotated[int, msgspec.Meta(ge=0)] | None = field(
        default=None,
        metadata={
            "help": "simulated, to inject a fault: the process is killed when a prompt has this token or it is made"
        },
    )
    hang_on_token: Annotated[int, msgspec.Meta(ge=0)] | None = field(
        default=None, metadata={"help": "simulated, to inject a fault: the device hangs at this token"}
    )
    vocab_size: _Count = field(
        default=32000, metadata={"help": "simulated: size of the vocabulary where --model is not a directory"}
    )
