"""vLLM's offline engine on the rows of `bench.gpu`, in a process of its own that knows nothing of Penstock.

Run as a file: the peer's packages need not fit with ours. Answers as `in_process` does.
"""

import json
import os
import sys
import time

BEGAN_S = time.perf_counter()
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def answer(**values: object) -> None:
    print("\nRESULT " + json.dumps(values), flush=True)


def main() -> None:
    asked = json.loads(sys.stdin.read())
    import vllm  # noqa: PLC0415  (slow)

    llm = vllm.LLM(
        model=asked["model"],
        gpu_memory_utilization=0.85,
        max_num_seqs=512,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **asked["options"],
    )
    ready_s = time.perf_counter() - BEGAN_S

    def run(prompts: list[list[int]], num_tokens: list[int], temperature: float) -> float:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        params = [
            vllm.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=num, detokenize=False)
            for num in num_tokens
        ]
        began_s = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        for output, num in zip(outputs, num_tokens, strict=True):
            assert len(output.outputs[0].token_ids) == num
        return seconds

    run([[1] * 10], [8], 0.0)
    answer(version=vllm.__version__, ready_s=ready_s, first_s=time.perf_counter() - BEGAN_S)
    for work in asked["works"]:
        prompts, num_tokens, temperature = work["prompts"], work["num_tokens"], work["temperature"]
        seconds = [run(prompts, num_tokens, temperature) for _ in range(work["num_rounds"])]
        answer(row=work["name"], seconds=seconds)


if __name__ == "__main__":
    main()
