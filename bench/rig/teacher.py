"""A model's own view of a whole sequence, in fp32: how far from its favourite each token of an answer is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def gaps(model: Path, dtype: str, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[F32]:
    """For each (prompt, output): f32[output tokens], log-probability of the likeliest token less that of the given one.

    The weights are rounded to `dtype`, as where they are served, and everything is computed in fp32 by transformers,
    one sequence after the other and without a cache, on a GPU if there is one: no batch, chunk or death disturbs it.

    Raises:
        SystemExit: transformers is not installed.
    """
    try:
        import torch  # noqa: PLC0415  (takes seconds, and only this needs it)
        from transformers import AutoModelForCausalLM  # noqa: PLC0415
    except ImportError as error:
        raise SystemExit(f"the audit needs transformers (pip install transformers): {error}") from error
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = loaded.float().to(device).eval()
    found = []
    with torch.inference_mode():
        for prompt, output in answers:
            logits = teacher(torch.tensor([[*prompt, *output]], device=device)).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(output, dtype=torch.long, device=device)[:, None])[:, 0]
            found.append((logprobs.max(-1).values - chosen).cpu().numpy())
    return found
