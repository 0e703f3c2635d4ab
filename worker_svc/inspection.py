"""`python -m worker_svc.inspection`: what a worker would load and where it would run it, as JSON, without doing so."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from contract.domain.errors import PenstockError
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.model import read_checkpoint
from servicekit.settings import load
from worker_svc.runner_options import RunnerOptions
from worker_svc.settings import WorkerSettings


def main(argv: Sequence[str]) -> int:
    """Takes a worker's flags; the exit status is 0 whatever was found."""
    settings = load(WorkerSettings, argv, os.environ)
    try:
        found = inspect(settings)
    except PenstockError as error:
        found = {"error": error.message}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def inspect(settings: WorkerSettings) -> dict[str, Any]:
    """The model and the devices.

    Raises:
        PenstockError: INTERNAL: the checkpoint cannot be used, or torch is not there.
    """
    if settings.runner == "simulated":
        return {"runner": "simulated"}
    try:
        import torch  # noqa: PLC0415  (so that its absence can be told)
    except ImportError as error:
        return {"error": f"torch cannot be imported ({error}): install penstock[worker]"}
    # These need it.
    from worker_svc.implementation import find_loader  # noqa: PLC0415
    from worker_svc.weights import weight_files  # noqa: PLC0415

    checkpoint = read_checkpoint(find_checkpoint(settings.model, settings.revision, with_weights=True))
    options = RunnerOptions(
        settings.model,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        max_model_len=settings.max_model_len,
        rank=settings.rank,
        world_size=settings.tensor_parallel_size,
        quantization=settings.quantization,
        model_impl=settings.model_impl,
        load_format=settings.load_format,
    )
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda and settings.device != "cpu" else "cpu")
    return {
        **asdict(find_loader(options, checkpoint).describe(options, device)),
        "weight_bytes": sum(path.stat().st_size for path in weight_files(checkpoint.directory)),
        "torch": torch.__version__,
        "gpus": [
            {"name": torch.cuda.get_device_name(index), "bytes": torch.cuda.get_device_properties(index).total_memory}
            for index in range(torch.cuda.device_count() if has_cuda else 0)
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
