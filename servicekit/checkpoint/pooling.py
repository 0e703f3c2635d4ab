"""The pooling that a checkpoint of embeddings asks for, as sentence-transformers writes it beside the model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from contract.domain.errors import broken
from contract.domain.pooling import PoolingFacts, PoolingKind
from servicekit.checkpoint.facts import hidden_size
from servicekit.checkpoint.model import CONFIG, Checkpoint, read_json

MODULES = "modules.json"
_MODES: Final = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
}
# Ends of names of architectures.
_GENERATING: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_SCORING: Final = ("ForSequenceClassification",)
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")


def pooling_facts(checkpoint: Checkpoint) -> PoolingFacts:
    """The pooling of a checkpoint: without a `modules.json` the last hidden state of a decoder and the first of an
    encoder, of length 1, as vLLM has it.

    Raises:
        PenstockError: INTERNAL (operator): a file is broken.
    """
    size = hidden_size(checkpoint)
    if _ends(checkpoint, _SCORING):
        return PoolingFacts(size=size, scores_pairs=True)
    modules = _modules(checkpoint.directory / MODULES)
    if not modules:
        generates = not checkpoint.config.get("architectures") or _ends(checkpoint, _GENERATING)
        return PoolingFacts(PoolingKind.LAST if generates else PoolingKind.CLS, size=size)
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    normalize = "Normalize" in kinds
    if others := [kind for kind in kinds if kind not in _KNOWN]:
        return PoolingFacts(normalize=normalize, size=size, trouble=f"the module {others[0]!r:.80} of {MODULES}")
    path = next(
        (str(each.get("path", "")) for each, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), None
    )
    if path is None:
        return PoolingFacts(normalize=normalize, size=size)
    config = read_json(checkpoint.directory / path / CONFIG)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) == 1 and modes[0] in _MODES:
        return PoolingFacts(_MODES[modes[0]], normalize, size)
    said = " and ".join(modes) or "no way to pool"
    return PoolingFacts(normalize=normalize, size=size, trouble=f"{said} in {path}/{CONFIG}")


def _ends(checkpoint: Checkpoint, ends: tuple[str, ...]) -> bool:
    """Return whether the name of the architecture has one of these ends."""
    names = checkpoint.config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(ends)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise broken(f"{path} cannot be read as JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise broken(f"{path} must hold a list of objects; fetch the checkpoint again")
    return found
