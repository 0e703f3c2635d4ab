"""What every way of computing some products takes on this card, each alone: what lines of tables are drawn from.

    penstock bench ways --products normed:4864x4352,added:4352x16896 [--rows 1,32] [--most 8]

A product is its kind (normed of one row, plain of several, added, gated) and the outputs and inputs of its weight,
which is in bf16; of a gated one the outputs are gates and ups. Of each with each number of rows it tells what the
tables that come along choose, and the ways that took least, in microseconds, by the measure of `penstock tune`, with no
optional package. What a card cannot compute, or computes wrong, is left out.
"""

import argparse
import re
from collections.abc import Iterator, Sequence

import torch

from bench.rig.machine import describe_machine
from worker_svc.core.kernels.linear.product import Product
from worker_svc.measure import GraphMeasure, Measure
from worker_svc.tuner import Finding, Tuner
from worker_svc.tuning import card_of, packaged_lines

_PRODUCT = re.compile(r"(normed|plain|added|gated):(\d+)x(\d+)")


def parse_product(text: str) -> Product:
    """What KIND:OUTPUTSxINPUTS means.

    Raises:
        ValueError: it is not of this form.
    """
    match = _PRODUCT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not KIND:OUTPUTSxINPUTS with the kind normed, plain, added or gated")
    return Product(match[1], int(match[2]), int(match[3]))  # type: ignore[arg-type]


def describe(finding: Finding, most: int) -> Iterator[str]:
    """Lines about it: what tables choose, then at most so many ways, the fastest first, beside the fastest one."""
    product, times = finding.product, finding.times
    standing = times.get(finding.standing)
    chosen = f"{standing.median_us:.2f} us" if standing else "wrong or not there"
    yield f"{product.kind}:{product.outputs}x{product.inputs}, rows: {finding.rows[-1]}; {chosen} by {finding.standing}"
    fastest = times[finding.best].median_us
    for way, measured in sorted(times.items(), key=lambda each: each[1].median_us)[:most]:
        yield f"{measured.median_us:10.2f}  {measured.median_us / fastest:.3f}  {way}"


def tell(
    device: torch.device, measure: Measure, products: Sequence[Product], sizes: Sequence[int], most: int
) -> Iterator[str]:
    """Measure products with so many rows: what `describe` says of each."""
    for product in products:
        # Of each a tuner of its own: none stands on what another found.
        tuner = Tuner(device, packaged_lines(card_of(device)), None, measure)
        is_told = False
        for finding in tuner.tune([product], sizes):
            is_told = True
            yield from describe(finding, most)
        if not is_told:
            yield f"{product.kind} products have none of these numbers of rows: normed ones have one, plain ones more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", required=True, help="KIND:OUTPUTSxINPUTS, separated by commas")
    parser.add_argument("--rows", default="1", help="numbers of rows, separated by commas")
    parser.add_argument("--most", type=int, default=8, help="ways that are told of each")
    options = parser.parse_args()
    try:
        products = [parse_product(text) for text in options.products.split(",")]
        sizes = [int(rows) for rows in options.rows.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if min(sizes) < 1:
        parser.error("--rows are numbers from 1 on")
    if not torch.cuda.is_available():
        parser.error("ways are measured on a GPU, and torch finds none here")
    device = torch.device("cuda")
    print(describe_machine(), flush=True)
    for line in tell(device, GraphMeasure(device), products, sizes, options.most):
        print(line, flush=True)


if __name__ == "__main__":
    main()
