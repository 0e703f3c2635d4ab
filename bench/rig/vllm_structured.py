"""vLLM's offline engine on the batches of `bench.structured_speed`, in a process of its own that knows nothing of
Penstock.

Run as a file: the peer's packages need not fit with ours. Reads one JSON object: model, schema, and batches of prompts
(token ids), of which requests have the form, and how many tokens each output has; answers with the seconds of each.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def answer(**values: object) -> None:
    print("\nRESULT " + json.dumps(values), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.read())
    import vllm  # noqa: PLC0415  (slow)
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

    llm = vllm.LLM(
        model=asked["model"],
        load_format="dummy",
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        max_num_seqs=512,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    answer(version=vllm.__version__)
    for batch in asked["batches"]:
        inputs = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        params = [
            vllm.SamplingParams(
                max_tokens=batch["num_tokens"],
                temperature=0.8,
                seed=number,
                structured_outputs=StructuredOutputsParams(json=asked["schema"]) if has_form else None,
                ignore_eos=not has_form,
            )
            for number, has_form in enumerate(batch["has_form"])
        ]
        began_s = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        answer(seconds=seconds, num_tokens=num_tokens)


if __name__ == "__main__":
    main()
