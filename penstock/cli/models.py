"""`penstock models`: the models that workers load, and how that was proved."""

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from worker_svc.core.models import FAMILIES
from worker_svc.core.models.media import TEXTS

_MODULES = (
    "Any other decoder that transformers has is run by transformers' own module over paged attention, if penstock"
    "[transformers] is installed (--model-impl auto or transformers). When a worker starts, before weights are read, "
    "a tiny instance of the checkpoint's configuration goes through chunks, mixed batches, shared prefixes and "
    "preemption, and must agree with the module by itself, eager, in fp32; else the architecture is refused with what "
    "differs. `penstock check --model DIR` does that for a checkpoint, `penstock models --transformers` for the "
    "default configuration of every decoder and encoder of the transformers that is installed. One rank, no "
    "quantization, no CUDA graphs."
)
_ENCODERS = (
    "Encoders that transformers has (BERT, RoBERTa, XLM-RoBERTa, ModernBERT, MPNet, DistilBERT, DeBERTa …) make "
    "vectors of prompts, from checkpoints without a head or with that of masked tokens: a tiny instance must give "
    "prompts of several lengths in a matrix the hidden states that each has by itself. A prompt is computed whole, "
    "within the model's positions and the tokens of a step; nothing is generated. Their classifiers with one label are "
    "cross-encoders: they score pairs of texts."
)
_KEPT = "multiplied as stored, inputs rounded for each token, if the checkpoint rounds any; on cards before Ada widened"
_WIDENED = "widened to the model's dtype while it is read"
_INT4 = (
    "multiplied as stored on a Hopper, experts wherever kernels compute (groups of 16, 32, 64 or a multiple of 128 "
    "inputs)"
)
_BLOCKS = "multiplied as stored on a Hopper (blocks of a multiple of 64 inputs); inputs are not rounded"
_FORMATS = (
    ("dense", "float32, bfloat16, float16 and whatever else safetensors has of floats; converted when it is read"),
    ("compressed-tensors", f"8-bit floats with a scale for each output or one: {_KEPT}"),
    ("", f"integers of 4 bits in words (W4A16): {_INT4}"),
    ("", f"8-bit floats in blocks: {_BLOCKS}"),
    ("", f"8-bit integers (W8A16, too), NVFP4, MXFP4: {_WIDENED}"),
    ("fp8", f"one scale (AutoFP8, transformers): {_KEPT}; blocks (as Qwen3-FP8 has them): {_BLOCKS}"),
    ("modelopt", f"8-bit floats with one scale (FP8): {_KEPT}; NVFP4: {_WIDENED}"),
    ("awq", f"4 bits, in the layout gemm: {_INT4}"),
    ("gptq", f"4 bits, both layouts of zeros: {_INT4}; 8 bits, or inputs in any order (desc_act): {_WIDENED}"),
    ("mxfp4", "experts of gpt-oss as published: multiplied as stored"),
    ("--quantization fp8", "a dense checkpoint, rounded to 8-bit floats with a scale for each output; from Ada on"),
)
_PROOF = (
    "Each family's tokens and log-probabilities equal those of transformers' own class in fp32, eager, on tiny "
    "checkpoints with random weights: through chunks, mixed batches, preemption and the prefix cache "
    "(tests/parity); other values of the fields of its specification are seen there; one checkpoint of each on two "
    "ranks, some of each kind in half precision on a GPU. Excerpts of published configurations are read; no weights "
    "were at hand. What a config.json says and a family does not read is refused by its name before weights are read."
)
_PROOF_OF_FORMATS = (
    "Each format equals the weights that plain arithmetic makes of it, on one rank and on two and three, merged and "
    "cut (tests/unit/worker/test_formats.py), and models of several families with these in transformers' classes "
    "(tests/parity/test_quantized_parity.py); what compressed-tensors itself writes, gpt-oss's experts and blocks of "
    "8 bits equal what that package and transformers read. Heads are always widened; routers are dense. Integers of 4 "
    "bits and blocks of 8 are widened, too, where no kernel multiplies them: on other cards and on CPUs, in float32, "
    "of layers whose inputs or outputs no tile divides (128 and 64), and of ranks that part a group. Experts of 8-bit "
    "floats (blocks, too), of integers of 4 bits and of MXFP4 are multiplied as they are stored, with inputs in the "
    "model's dtype, where kernels compute. Scales of an 8-bit cache are used with --kv-cache-dtype fp8, else left out "
    "with a warning."
)


def main(argv: Sequence[str]) -> int:
    """Prints the list; the exit status."""
    parser = argparse.ArgumentParser(prog="penstock models", description=__doc__, allow_abbrev=False)
    parser.add_argument("--names", action="store_true", help="architectures alone, a line each")
    parser.add_argument(
        "--transformers", action="store_true", help="models of transformers' own, and whether they prove themselves"
    )
    asked = parser.parse_args(argv)
    if asked.names:
        print("\n".join(sorted((*FAMILIES, *TEXTS))))
        return 0
    console = Console()
    if asked.transformers:
        return _survey(console)
    console.print(_table("architecture", _families()))
    console.print(_table("format of weights", iter(_FORMATS)))
    console.print(_PROOF)
    console.print(_MODULES)
    console.print(_ENCODERS)
    console.print(_PROOF_OF_FORMATS)
    return 0


def _survey(console: Console) -> int:
    """Print a line for each model as soon as it is known; the exit status."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        print("torch and transformers are not both installed: install penstock[worker,transformers]", file=sys.stderr)
        return 2
    from worker_svc.transformers_survey import survey  # noqa: PLC0415  (imports both)

    for name, verdict in survey():
        console.print(name, verdict, markup=False, highlight=False, soft_wrap=True)
    return 0


def _families() -> Iterator[tuple[str, str]]:
    """Architectures as config.json names them, and what the file of each family says of it."""
    for architecture, family in sorted(FAMILIES.items()):
        module = inspect.getmodule(family)
        told = inspect.getdoc(module) if module is not None else None
        yield architecture, " ".join((told or "").split())
    for architecture, texts in sorted(TEXTS.items()):
        by = " or ".join(dict.fromkeys(texts.values()))
        yield architecture, f"Of several media: its text is served, by {by}; images and the like are refused."


def _table(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(title, "", box=None, padding=(0, 2, 0, 0))
    for name, meaning in rows:
        table.add_row(name, meaning)
    return table
