"""One GPU: our engine in one process, as the whole pipeline, and a peer, against what the card can do.

For each model, one after the other on an otherwise free card, each in processes of its own: the card's ceilings; `LLM`;
`penstock serve` with all services and its server, streaming over HTTP to clients in other processes; vLLM's offline
engine and its server, where they can be imported. Nothing is downloaded: models have the shapes of published ones and
random weights, which are written to files and which every engine loads from there: weights decide which experts tokens
choose, and how much power products take. Prompts are token ids, outputs are as long as asked for. A row's floor is the
time that the card needs at its ceilings (see `bench.rig.work`). The fastest of some rounds counts, of as many for every
engine; nano and served, which are long, have one.

    0.6b, 8b   decode1, decode8, decode32, decode128, decode256: that many sequences, 128 tokens in, 256 out
               prefill: 32 prompts of 2,048 tokens, one token out, prompt tokens per second
               long: 8 prompts of 16,000 tokens, likewise
               embed: 32 vectors of prompts as those of prefill, each in a call of its own; its share of prefill is told
               nano: 256 requests, in and out uniform in 100-1024, temperature 0.6 (nano-vllm's bench)
    llama-1b, llama-8b, qwen-7b (Llama-3.2-1B, Llama-3.1-8B, Qwen2.5-7B), 30b-a3b (Qwen3-30B-A3B), gemma-4b (Gemma 3
    4B, its text), v2-lite (DeepSeek-V2-Lite), gpt-oss-20b, 8b-awq and 30b-a3b-awq (8b and 30b-a3b
               in AWQ), 8b-fp8-blocks (8b in 8-bit floats with scales for blocks), 8b-fp8 (8b, rounded to 8-bit floats
               by each engine when it is read): the rows decode1 to decode256, prefill and long
    8b-fp8-kv  8b-fp8 with keys and values of 8 bits: likewise, and
               contexts: 64 prompts of 8,000 tokens, one token out, prompt tokens per second
               deep: the same prompts, 512 tokens out; those after the first and the time beyond that of contexts count
    NAME-zipf  one of those with experts, of which tokens choose by Zipf's law (exponent 1): likewise
    drawn-SEED-NUMBER   a dense model about as large as 8b, whose shape the seed draws: likewise
    v32k       0.6b's layers and a vocabulary in which every id has a text; prompts are texts
               served: 2,000 requests of 512 -> 128, 256 at once; alone: 128 -> 128, one at a time
    8b-text    8b's layers; prompts are texts
               rate: 16 requests a second at random times, 410-1,638 tokens in, 102-410 out, everything by default

    penstock bench gpu [--models 0.6b,8b,v32k] [--profile]
    penstock bench gpu --models 8b,drawn-7-1,drawn-7-2 --tune     with a table of each model's products
    penstock bench gpu --models 8b --rows decode32,decode256 --tune 32,256     likewise, of so many rows only
    penstock bench gpu --models v32k --simulated-ms 2      without a GPU: the pipeline around a runner that pretends
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from bench.rig import engines
from bench.rig.children import ChildError, ask
from bench.rig.drawn_shapes import find_shape
from bench.rig.engines import Measured, Options
from bench.rig.machine import describe_machine
from bench.rig.shapes import SHAPES, Shape, write_shape
from bench.rig.table import embed_lines, header, latency_lines, notes, row_line
from bench.rig.work import Ceilings, Work, as_text, make_work

_OFFLINE = ("decode1", "decode8", "decode32", "decode128", "decode256", "prefill", "long")
_ROWS = {
    "0.6b": (*_OFFLINE, "nano", "embed"),
    "8b": (*_OFFLINE, "nano"),
    "v32k": ("served", "alone"),
    "8b-text": ("rate",),
    "8b-fp8-kv": (*_OFFLINE, "contexts", "deep"),
}
_CHUNKS = {"0.6b": 8192, "v32k": 2048, "8b-text": 0}  # tokens of a step; 0: as is the default
_CHUNK = 16_384  # of other models: as many as vLLM's offline engine has by default on an H100 or H200
_TUNING_S = 1800.0  # at most, for a model
PROFILED = (1, 32, 256)
ENGINES = ("process", "pipeline", "peer")
CACHES = ("TRITON_CACHE_DIR", "QUACK_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")  # of kernels on disk


@dataclass(frozen=True)
class Model:
    """One model's folder and what is done with it."""

    name: str
    shape: Shape
    folder: Path
    works: list[Work]
    options: Options


def works_of(name: str, chosen: Sequence[str], rounds: int) -> list[Work]:
    """The rows of a model, or those of them that were chosen, with those that these come after."""
    works = {row: make_work(row, rounds) for row in _ROWS.get(name, _OFFLINE)}
    wanted = {row for row in works if not chosen or row in chosen}
    wanted |= {works[row].after or row for row in wanted}
    return [work for row, work in works.items() if row in wanted]


def prepare(name: str, folder: Path, works: list[Work], arguments: argparse.Namespace) -> Model:
    """Writes the folder."""
    shape = find_shape(name)
    write_shape(folder, shape)
    is_missing = any(not _kept(arguments.keep, name, engine).is_file() for engine in arguments.engines.split(","))
    skew = shape.experts.skew if shape.experts else 0.0
    if not arguments.simulated_ms and is_missing:
        [written] = ask([sys.executable, "-m", "bench.rig.random_weights", str(folder), str(skew)], {}, 300.0)
        print(
            f"{name}: {written['num_bytes'] / 1e9:.1f} GB of weights written in {written['seconds']:.0f} s", flush=True
        )
        if arguments.tune is not None:
            ask(tune_command(folder, shape.quantization, arguments.tune), {}, _TUNING_S)
    if shape.has_texts:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        works = [as_text(work, tokenizer) for work in works]
    options = Options(
        chunk=arguments.chunk or _CHUNKS.get(name, _CHUNK),
        gateways=arguments.gateways,
        simulated_ms=arguments.simulated_ms,
        profiled=PROFILED if arguments.profile and not arguments.simulated_ms else (),
        peer_path=arguments.peer_path,
        limit_s=arguments.limit_s,
        more=arguments.serve,
        quantization=shape.quantization,
        kv_cache_dtype=shape.kv_cache_dtype,
    )
    return Model(name, shape, folder, works, options)


def tune_command(folder: Path, quantization: str | None, rows: str) -> list[str]:
    """`penstock tune` of a model with these numbers of rows; none: with all that it measures."""
    flags = ["--quantization", quantization] if quantization else []
    flags += ["--rows", rows] if rows else []
    return [sys.executable, "-m", "penstock.cli", "tune", "--model", str(folder), *flags]


def _kept(keep: Path, model: str, engine: str) -> Path:
    return keep / f"{model}-{engine}.json"


def measure_ceilings(keep: Path) -> Ceilings:
    """Of this card."""
    kept = keep / "ceilings.json"
    if not kept.is_file():
        [answer] = ask([sys.executable, "-m", "bench.rig.ceilings"], {}, 120.0)
        kept.write_text(json.dumps(answer), "utf-8")
    ceilings = Ceilings(**json.loads(kept.read_text("utf-8")))
    print(
        f"card      {ceilings.name}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.flops / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return ceilings


def measure(model: Model, chosen: Sequence[str], keep: Path) -> tuple[dict[str, Measured], list[str]]:
    """The results of each engine, and what went wrong."""
    found: dict[str, Measured] = {}
    wrong = []
    runs = {
        "process": engines.in_process,
        "pipeline": engines.pipeline,
        "peer": engines.peer_server if model.shape.has_texts else engines.peer,
    }
    # Requests that come at times have none in one process.
    have_times = any(work.arrivals_s for work in model.works)
    for engine in (each for each in chosen if each != "process" or not have_times):
        kept = _kept(keep, model.name, engine)
        if kept.is_file():
            found[engine] = Measured.from_json(kept.read_text("utf-8"))
            continue
        try:
            measured = runs[engine](model.folder, model.works, model.options)
        except ChildError as error:
            wrong.append(f"{model.name} {engine}: {error}")
            print(wrong[-1], flush=True)
            continue
        if measured is not None:
            found[engine] = measured
            kept.write_text(measured.as_json(), "utf-8")
            print(f"{model.name} {engine}: {measured.summary()}", flush=True)
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="0.6b,8b,v32k,8b-text", help=f"of {', '.join(SHAPES)}, NAME-zipf, drawn-SEED-NUMBER"
    )
    parser.add_argument("--rows", default="", help="only these")
    parser.add_argument("--engines", default=",".join(ENGINES), help="only these of process, pipeline, peer")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each short row, of which the fastest counts")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step at most; 0: what suits the model")
    parser.add_argument("--gateways", type=int, default=4, help="gateway processes of the pipeline")
    parser.add_argument("--serve", action="append", default=[], help="a further flag for `penstock serve`")
    parser.add_argument("--profile", action="store_true", help="where the time of decode steps and prompts goes")
    parser.add_argument("--peer-path", default="", help="a folder with the peer's packages, if they are not installed")
    parser.add_argument(
        "--tune",
        metavar="ROWS",
        nargs="?",
        const="",
        help="`penstock tune` each model before it is measured, with these numbers of rows [with all that it measures]",
    )
    parser.add_argument("--keep", type=Path, help="a folder for what was measured: found there, it is not done again")
    parser.add_argument("--limit-s", type=float, default=500.0, help="an engine in one process is ended then")
    parser.add_argument("--simulated-ms", type=float, default=0.0, help="no GPU: a runner with steps of that long")
    arguments = parser.parse_args()
    try:
        for name in arguments.models.split(","):
            find_shape(name)
    except ValueError as error:
        parser.error(str(error))
    if arguments.tune is not None and arguments.simulated_ms:
        parser.error("--tune measures on a GPU: leave out --simulated-ms")
    if arguments.tune and not re.fullmatch(r"\d+(,\d+)*", arguments.tune):
        parser.error(f"--tune: {arguments.tune!r} is no list of numbers of rows, such as 1,32,256")
    print(describe_machine(), flush=True)
    lines, failures = [], []
    with TemporaryDirectory(prefix="penstock-bench-") as directory:
        arguments.keep = arguments.keep or Path(directory)
        arguments.keep.mkdir(parents=True, exist_ok=True)
        if arguments.tune is not None:  # tables of this run alone
            os.environ["XDG_CACHE_HOME"] = str(Path(directory) / "cache")
        ceilings = None if arguments.simulated_ms else measure_ceilings(arguments.keep)
        for name in arguments.models.split(","):
            folder = Path(directory) / name
            folder.mkdir()
            # The first start of a model compiles all its kernels, the second finds them.
            os.environ |= {variable: str(Path(directory) / f"{name}-{variable}") for variable in CACHES}
            works = works_of(name, arguments.rows.split(",") if arguments.rows else (), arguments.rounds)
            model = prepare(name, folder, works, arguments)
            found, wrong = measure(model, arguments.engines.split(","), arguments.keep)
            failures += wrong
            lines += [row_line(name, work, found, ceilings) for work in model.works if work.arrivals_s is None]
            lines += [line for work in model.works for line in latency_lines(name, work, found)]
            lines += embed_lines(name, model.works, found)
            lines += [f"{name:8} {line}" for line in notes(found)]
            for path in folder.iterdir():
                path.unlink()
    print("\n".join(["", header(), *lines]))
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
