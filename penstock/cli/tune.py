"""`penstock tune`: measures the products of a model on this machine's GPU, and writes the table that workers read."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from contract.domain.errors import broken

_MOST_ROWS = 1 << 16


def main(argv: Sequence[str]) -> int:
    """Writes a table; the exit status.

    Raises:
        PenstockError: INTERNAL (operator): there is no GPU, no torch, no such model, or a file that is no table.
    """
    parser = argparse.ArgumentParser(
        prog="penstock tune",
        description="Measures all ways to compute a model's products on this machine's GPU, and writes a table of "
        "those that are better than what is chosen without it. Workers with this cache folder read it when they start.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="checkpoint directory or Hugging Face hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float16"), default="auto", help="of weights [stored]")
    parser.add_argument("--quantization", help="fp8: of a dense checkpoint 8-bit floats [as it is stored]")
    parser.add_argument("--tensor-parallel-size", type=_count, default=1, help="ranks that share the model [1]")
    parser.add_argument(
        "--rows", type=_rows, help="numbers of rows to measure, separated by commas [19 of them, from 1 to 2048]"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=_path,
        help="where the table goes; what is said there of other products stays [this card's own in "
        "$XDG_CACHE_HOME/penstock/tuning]",
    )
    arguments = parser.parse_args(argv)
    try:
        import torch  # noqa: PLC0415  (heavy, and only workers have it)
    except ModuleNotFoundError as error:
        raise broken("torch is not installed, which measures: pip install 'penstock[worker]'") from error
    if not torch.cuda.is_available():
        raise broken("torch finds no CUDA device here: a table is measured on the card that it is for")
    from worker_svc.measure import GraphMeasure  # noqa: PLC0415  (these import torch and triton)
    from worker_svc.tuner import ROWS, TuningOptions, tune_model  # noqa: PLC0415

    # fp32 means fp32: it is what all ways are compared with.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    options = TuningOptions(
        model=arguments.model,
        revision=arguments.revision,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        tensor_parallel_size=arguments.tensor_parallel_size,
        sizes=arguments.rows or ROWS,
        out=arguments.out,
    )
    tune_model(options, torch.device("cuda", 0), GraphMeasure, lambda line: print(line, flush=True))
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def _rows(text: str) -> tuple[int, ...]:
    rows = tuple(_count(each) for each in text.split(","))
    if max(rows) > _MOST_ROWS:
        raise argparse.ArgumentTypeError(f"at most {_MOST_ROWS}: more are no step")
    return rows


def _path(text: str) -> Path:
    return Path(text).expanduser()
