"""The price of structured outputs: tokens a second of a batch by the share of its requests that have a form.

    penstock bench structured-speed [--model 8b-text] [--batches 1,32,256] [--rounds 3]
    penstock bench structured-speed --model v32k --simulated-ms 5      without a GPU: a runner that pretends

`LLM` in one process, 128 tokens in, 256 out. The form is a JSON schema: a list of objects with a text, a number, one
of some words and a list, so long that no output ends before its 256th token. Shapes of a published model, random
weights and a vocabulary in which every id has a text. Shares take turns; of the rounds of each the fastest counts.
Where vLLM can be imported (--peer-path), it does the same before, in a process of its own.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from bench.rig.children import ask
from bench.rig.engines import MAX_MODEL_LEN, MEMORY_SHARE, peer_environ
from bench.rig.machine import describe_machine
from bench.rig.shapes import SHAPES, write_shape
from penstock import LLM, SamplingParams, StructuredOutputsParams

_Run: TypeAlias = Callable[[int, float, int], float]  # requests at once, share with a form, tokens: seconds
NUM_INPUT, NUM_OUTPUT = 128, 256  # tokens
SHARES = (0.0, 0.2, 1.0)
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "role": {"enum": ["reader", "writer", "owner"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": False,
    },
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b-text", choices=[name for name, size in SHAPES.items() if size.has_texts])
    parser.add_argument("--folder", type=Path, help="where the model is written, and found if it is there")
    parser.add_argument("--batches", default="1,32,256", help="requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-path", default="", help="folder of vLLM's packages; none: it is not measured")
    parser.add_argument("--limit-s", type=float, default=500.0, help="for vLLM")
    parser.add_argument("--simulated-ms", type=float, default=0.0, help="no GPU: a runner with steps of that long")
    options = parser.parse_args()
    print(describe_machine(), flush=True)
    with TemporaryDirectory(prefix="penstock-bench-") as directory:
        folder = options.folder or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_shape(folder, SHAPES[options.model])
        if not options.simulated_ms and not list(folder.glob("*.safetensors")):
            ask([sys.executable, "-m", "bench.rig.random_weights", str(folder)], {}, 300.0)
        batches = [int(word) for word in options.batches.split(",")]
        if options.peer_path:
            _show_peer(folder, batches, options)
        llm = _engine(folder, options.simulated_ms)
        for batch in batches:
            print("Penstock " + _row(partial(_run, llm), batch, options.rounds), flush=True)


def _show_peer(folder: Path, batches: list[int], options: argparse.Namespace) -> None:
    """Prints vLLM's rows: what they need is told to it at once, in the order in which rows are made."""
    asked: list[dict[str, Any]] = []

    def note(batch: int, share: float, num_tokens: int) -> float:
        asked.append({"prompts": _prompts(batch), "has_form": _have_forms(batch, share), "num_tokens": num_tokens})
        return 1.0

    for batch in batches:
        _row(note, batch, options.rounds)
    work = {"model": str(folder), "schema": SCHEMA, "batches": asked}
    script = [sys.executable, str(Path(__file__).parent / "rig" / "vllm_structured.py")]
    version, *answers = ask(script, work, options.limit_s, peer_environ(options.peer_path))
    short = sum(
        answer["num_tokens"] < each["num_tokens"] * len(each["prompts"])
        for answer, each in zip(answers, asked, strict=True)
    )
    # Outputs that end early count as whole: too fast, if at all.
    seconds = iter([answer["seconds"] for answer in answers])
    print(f"vLLM {version['version']}; batches in which an output ended early: {short} of {len(asked)}", flush=True)
    for batch in batches:
        print("vLLM     " + _row(lambda *_: next(seconds), batch, options.rounds), flush=True)


def _engine(folder: Path, simulated_ms: float) -> LLM:
    chosen: dict[str, Any] = {"runner": "simulated", "step_ms": simulated_ms} if simulated_ms else {}
    return LLM(
        str(folder),
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=False,
        **chosen,
    )


def _row(run: _Run, batch: int, rounds: int) -> str:
    shares = [share for share in SHARES if share in (0.0, 1.0) or batch > 1]
    seconds: dict[float, list[float]] = {share: [] for share in shares}
    for share in shares:
        run(batch, share, 16)  # compiles grammars, allocates
    for _ in range(rounds):
        for share in shares:
            seconds[share].append(run(batch, share, NUM_OUTPUT))
    without = min(seconds[0.0])
    told = [
        f"{share:.0%}: {batch * NUM_OUTPUT / min(each):,.0f} tok/s ({without / min(each):.3f})"
        for share, each in seconds.items()
    ]
    return f"{batch:4} at once  " + "  ".join(told)


def _prompts(batch: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randint(0, 10000) for _ in range(NUM_INPUT)] for _ in range(batch)]


def _have_forms(batch: int, share: float) -> list[bool]:
    """Which requests have the form: they are spread over the batch."""
    num_forms = round(batch * share)
    return [number * num_forms // batch != (number + 1) * num_forms // batch for number in range(batch)]


def _run(llm: LLM, batch: int, share: float, num_tokens: int) -> float:
    """Seconds of a batch."""
    inputs = [{"prompt_token_ids": prompt} for prompt in _prompts(batch)]
    form = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            temperature=0.8,
            seed=number,
            structured_outputs=form if has_form else None,
            ignore_eos=not has_form,
        )
        for number, has_form in enumerate(_have_forms(batch, share))
    ]
    began_s = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - began_s
    if any(len(output.outputs[0].token_ids) != num_tokens for output in outputs):
        raise SystemExit("an output ended early: the form does not last for all of them")
    return seconds


if __name__ == "__main__":
    main()
