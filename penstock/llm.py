"""Generate with a model in this process: no Redis, no services, the same cores."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from contract.domain.errors import invalid, unimplemented
from contract.domain.params import SamplingParams
from contract.domain.pooling import PoolingParams
from penstock.arguments import check_choice, check_counts, dtype_name
from penstock.beam_search import BeamSearchOutput, BeamSearchParams, beam_output
from penstock.chat_tokenizer import ChatTokenizer
from penstock.engine import LLMEngine
from penstock.offline import Batches
from penstock.outputs import RequestOutput
from penstock.pooled_outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    pair_scores,
    scores,
)
from penstock.prompts import (
    Conversation,
    PromptLike,
    as_list,
    as_pairs,
    as_scored,
    at_index,
    parse_conversation,
    parse_prompt,
)
from scheduler_svc.core.config import SHORT_STEP_US, SchedulerConfig
from scheduler_svc.core.policy import POLICIES
from tokenizer_svc.loading import load_vocabulary
from worker_svc.loading import load_worker
from worker_svc.settings import WorkerSettings


class LLM:
    """A model that answers lists of prompts, batched.

    Args:
        model: directory in the Hugging Face layout, or a hub id.
        tokenizer: directory or hub id of the tokenizer; None: the model's.
        tokenizer_mode: "auto" or "fast": the tokenizer is always a fast one.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: code from a checkpoint is never run; True fails by name.
        dtype: "auto" (as stored; float32 on a CPU), "float32" or "float", "bfloat16", "float16" or
            "half", or a torch dtype.
        seed: where the seeds of requests without one are drawn from: the same calls give the same outputs.
        max_model_len: tokens of prompt and output together; None: what the model allows.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache.
        tensor_parallel_size: GPUs to spread the model over; only 1 so far.
        swap_space: GiB of host memory for preempted sequences; only 0 so far (they are computed again).
        quantization: "fp8": weights of a checkpoint that is not quantized are rounded to 8-bit floats when they are
            read; None (or the checkpoint's own method): as it is stored.
        kv_cache_dtype: "fp8" or "fp8_e4m3": keys and values are kept as 8-bit floats, times a scale for each layer that
            the checkpoint has (`k_scale`, `v_scale`), else 1; "auto": they are kept as they are computed.
        max_num_seqs: sequences that run at once, no more than `max_num_batched_tokens`; None: 256, or as KV memory
            allows.
        max_num_batched_tokens: tokens that one step computes at most: longer prompts are computed in chunks; None: as
            suits the model and the device.
        num_blocks: KV blocks; None: what fits.
        kv_cache_memory_bytes: memory of the KV cache; None: what fits.
        block_size: tokens of a KV block.
        enable_prefix_caching: whether prompts share the KV of equal beginnings.
        num_saved_states: where layers keep a state of each sequence, states that are saved for prompts with equal
            beginnings; None: as many as sequences, in an eighth of what weights and these leave;
            0: none is.
        min_saved_tokens: tokens that a saved state must save whoever begins with it.
        plans_in_flight: steps that are planned before their results come; one more while steps are short.
        scheduling_policy: "fcfs", "priority" or "fair".
        model_impl: whose model: "penstock" (our own families), "transformers" (transformers' own module over paged
            attention; needs `penstock[transformers]`), or "auto": the latter where no family is there.
        load_format: "auto" (the checkpoint's weights), or "dummy": random ones, to measure speed.
        attention: kernels, and always who attends for decoding sequences: "triton", "torch", or "auto": triton for
            half precision on CUDA and heads of 64-256 dimensions, torch for all else.
        prefill_attention: kernels for long chunks of prompts where triton's compute: "triton", "flash_attn" (an
            optional package), or "auto": a FlashAttention package if installed, but only on a Hopper with heads of 64
            or 128 and up to four queries of a key, where it was faster; else triton.
        cuda_graphs: whether decode steps are recorded as CUDA graphs, where triton's kernels compute.
        runner: "torch", or "simulated": no model runs, tokens are pretended.
        step_ms: time that a simulated step takes, milliseconds.
        num_threads: threads of a step on a CPU, of the whole process; None: one less than the cores it may use.
        generation_config: whose generation_config.json says what holds without `sampling_params`: "model" (or "auto"):
            the model's; "openai" (or "vllm"): nobody's; or that of a directory.

    Raises:
        PenstockError: an argument is wrong (the caller's fault), not implemented yet (named), or the checkpoint is
            missing, broken or of an unsupported architecture (named).
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: Any = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        tensor_parallel_size: int = 1,
        swap_space: float = 0,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        num_saved_states: int | None = None,
        min_saved_tokens: int = 256,
        plans_in_flight: int = 2,
        scheduling_policy: str = "fcfs",
        model_impl: str = "auto",
        load_format: str = "auto",
        attention: str = "auto",
        prefill_attention: str = "auto",
        cuda_graphs: bool = True,
        runner: str = "torch",
        step_ms: float = 0.0,
        num_threads: int | None = None,
        generation_config: str = "model",
    ) -> None:
        if tokenizer_mode not in ("auto", "fast"):
            raise unimplemented(f"tokenizer_mode {tokenizer_mode!r} (there are: auto, fast)")
        if trust_remote_code:
            raise unimplemented("trust_remote_code (code that comes with a checkpoint)")
        if tensor_parallel_size != 1:
            raise unimplemented(f"tensor_parallel_size {tensor_parallel_size}")
        if swap_space:
            raise unimplemented(f"swap_space {swap_space}")
        if not 0 < gpu_memory_utilization <= 1:
            raise invalid(
                f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization!r}", "gpu_memory_utilization"
            )
        if not 0 <= step_ms < math.inf:
            raise invalid(f"step_ms must be 0 or more milliseconds, got {step_ms!r}", "step_ms")
        check_counts(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            plans_in_flight=plans_in_flight,
            min_saved_tokens=min_saved_tokens,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_model_len=max_model_len,
            num_threads=num_threads,
        )
        if num_saved_states:
            check_counts(num_saved_states=num_saved_states)
        check_choice("scheduling_policy", scheduling_policy, tuple(POLICIES))
        check_choice("model_impl", model_impl, ("auto", "penstock", "transformers"))
        check_choice("load_format", load_format, ("auto", "dummy"))
        check_choice("kv_cache_dtype", kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))
        check_choice("attention", attention, ("auto", "torch", "triton"))
        check_choice("prefill_attention", prefill_attention, ("auto", "triton", "flash_attn"))
        check_choice("dtype", dtype_name(dtype), ("auto", "float32", "bfloat16", "float16"))
        check_choice("runner", runner, ("torch", "simulated"))
        model = str(model)
        vocabulary = load_vocabulary(
            model,
            tokenizer=tokenizer,
            revision=revision,
            max_model_len=max_model_len,
            generation_config=generation_config,
            trust_request_chat_template=True,  # who calls this is who started it
        )
        worker = load_worker(
            WorkerSettings(
                model=model,
                revision=revision,
                runner="simulated" if runner == "simulated" else "model",
                dtype=cast(Any, dtype_name(dtype)),
                model_impl=cast(Any, model_impl),
                load_format=cast(Any, load_format),
                quantization=quantization,
                kv_cache_dtype=cast(Any, kv_cache_dtype),
                attention=cast(Any, attention),
                prefill_attention=cast(Any, prefill_attention),
                cuda_graphs=cuda_graphs,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                num_blocks=num_blocks,
                num_saved_states=num_saved_states,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                gpu_memory_utilization=gpu_memory_utilization,
                step_ms=step_ms,
                num_threads=num_threads,
                vocab_size=vocabulary.vocab_size,
            )
        )
        config = SchedulerConfig(
            scheduling_policy=scheduling_policy,
            plans_in_flight=plans_in_flight,
            short_step_us=SHORT_STEP_US,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            min_saved_tokens=min_saved_tokens,
        )
        self.llm_engine = LLMEngine(vocabulary, worker.runner, config, seed=seed)
        self._batches = Batches(self.llm_engine)

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer that prompts go through, with the model's chat templates."""
        return ChatTokenizer(self.llm_engine.prompt_tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none: the model's defaults, and vLLM's for what they leave open."""
        return self.llm_engine.vocabulary.defaults.params()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch; outputs come in the order of the prompts.

        Args:
            prompts: one or a list of: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: one for all or one for each, which count as they are; None: the model's defaults
                (`get_default_sampling_params`). `max_tokens` beyond the context are as many as it leaves.
            use_tqdm: whether a bar shows the progress and the speed of prefill and decode.
            priority: one for each prompt, lower is served first (with `scheduling_policy="priority"` or "fair").

        Raises:
            PenstockError: a prompt is wrong, naming its index. Nothing was generated then, or what was is given up; the
                `LLM` is as good as before.
        """
        parsed = []
        for index, value in enumerate(as_list(prompts)):
            with at_index("prompts", index):
                parsed.append(parse_prompt(value))
        return self._batches.run(parsed, sampling_params, priority, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template; otherwise as `generate`.

        Args:
            messages: one conversation or a list of them; each is a list of `{"role": …, "content": text}`.
            sampling_params: one for all or one for each; None: the model's defaults.
            use_tqdm: whether a bar shows the progress.
            add_generation_prompt: whether the template opens an answer.
            continue_final_message: whether the model goes on with the last message instead of answering it.
            tools: what the template offers as tools; it must read them.
            chat_template: another template, or the name of one of the model's; None: as transformers chooses.
            chat_template_kwargs: further variables of the template.
        """
        kwargs: dict[str, Any] = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            kwargs["continue_final_message"] = True
        if tools:
            kwargs["tools"] = list(tools)
        if chat_template is not None:
            kwargs["chat_template"] = chat_template
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        each: Sequence[Any] = [messages] if single else messages
        parsed = []
        for index, value in enumerate(each):
            with at_index("conversations", index):
                parsed.append(parse_conversation(value, kwargs, ("tools",) if tools else ()))
        return self._batches.run(parsed, sampling_params, None, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search the best outputs of prompts, all in one batch; `generate` with `use_beam_search` does the same.

        Args:
            prompts: as `generate` takes them.
            params: how to search.
            use_tqdm: whether a bar shows the progress.

        Raises:
            PenstockError: as `generate`.
        """
        outputs = self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)
        decode = partial(self.llm_engine.prompt_tokenizer.decode, skip_special_tokens=False)
        return [beam_output(output, params, decode) for output in outputs]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make vectors of prompts, all in one batch; outputs come in the order of the prompts.

        Args:
            prompts: as `generate` takes them.
            pooling_params: one for all or one for each; None: as the checkpoint says, else the last hidden state of a
                decoder, the first of an encoder, of length 1.
            use_tqdm: whether a bar shows the progress.
            truncate_prompt_tokens: the last so many tokens of each prompt count, -1: as many as fit; where the
                parameters do not say it.

        Raises:
            PenstockError: a prompt or a parameter is wrong, naming its index.
        """
        outputs = self._batches.pool(prompts, pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm)
        return [EmbeddingRequestOutput.of(each) for each in outputs]

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str = "embed",
    ) -> list[PoolingRequestOutput]:
        """As `embed`, with the vectors as arrays.

        Args:
            prompts: as `generate` takes them.
            pooling_params: as `embed` takes them.
            use_tqdm: whether a bar shows the progress.
            truncate_prompt_tokens: as `embed` takes it.
            pooling_task: "embed".

        Raises:
            PenstockError: as `embed`; UNIMPLEMENTED: another task.
        """
        if pooling_task != "embed":
            raise unimplemented("pooling_task", f"pooling_task {pooling_task!r} (there is: embed)")
        outputs = self._batches.pool(prompts, pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm)
        return [PoolingRequestOutput.of(each) for each in outputs]

    def score(
        self,
        text_1: PromptLike | Sequence[PromptLike],
        text_2: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """The likeness of pairs of texts: the cosine between their vectors, or the score that a cross-encoder gives.

        Args:
            text_1: one for all of `text_2`, or one for each.
            text_2: one or several.
            pooling_params: as `embed` takes them, the same for all.
            use_tqdm: whether a bar shows the progress.
            truncate_prompt_tokens: as `embed` takes it.

        Raises:
            PenstockError: as `embed`; INVALID_ARGUMENT: as many of one as of the other cannot be paired.
        """
        prompts, num_first = as_pairs(text_1, text_2)
        if self.llm_engine.vocabulary.pooling.scores_pairs:
            pairs = as_scored(prompts, num_first)
            return pair_scores(self._batches.score(pairs, pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm))
        outputs = self._batches.pool(prompts, pooling_params, truncate_prompt_tokens, use_tqdm=use_tqdm)
        return scores(outputs, num_first)
