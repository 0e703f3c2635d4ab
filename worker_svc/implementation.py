"""The choice of whose code a model is: our own families, or transformers' modules."""

from importlib.util import find_spec

from contract.domain.errors import ErrorCode, PenstockError, invalid
from servicekit.checkpoint.model import Checkpoint
from worker_svc.core.models import FAMILIES
from worker_svc.core.models.media import TEXTS
from worker_svc.loaded_model import Loader
from worker_svc.native import NativeLoader
from worker_svc.runner_options import RunnerOptions

_IMPLEMENTATIONS = ("auto", "penstock", "transformers")


def uses_transformers(model_impl: str, checkpoint: Checkpoint) -> bool:
    """Return whether transformers' module is to be taken: where it is asked for, or where no family of ours is named.

    Raises:
        PenstockError: INVALID_ARGUMENT naming `model_impl`: there is no such one; UNIMPLEMENTED: transformers, which
            the model needs, is not installed.
    """
    if model_impl not in _IMPLEMENTATIONS:
        raise invalid(f"model_impl must be {', '.join(_IMPLEMENTATIONS)}, got {model_impl!r}", "model_impl")
    name = architecture(checkpoint)
    if model_impl == "penstock" or (model_impl == "auto" and (name is None or name in FAMILIES or name in TEXTS)):
        return False
    if find_spec("transformers") is None:
        raise _missing(name, "which is not installed")
    return True


def architecture(checkpoint: Checkpoint) -> str | None:
    """The first that config.json names; None: it names none."""
    names = checkpoint.config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def find_loader(options: RunnerOptions, checkpoint: Checkpoint) -> Loader:
    """The way to load a checkpoint, once all is known of it but its weights.

    Raises:
        PenstockError: see `uses_transformers` and `load_runner`.
    """
    if not uses_transformers(options.model_impl, checkpoint):
        return NativeLoader(options, checkpoint)
    try:
        from worker_svc.transformers_loading import transformers_loader  # noqa: PLC0415  (imports transformers)
    except ImportError as error:
        raise _missing(architecture(checkpoint), f"which cannot be imported ({error})") from error
    return transformers_loader(options, checkpoint)


def _missing(name: str | None, why: str) -> PenstockError:
    others = "" if name in FAMILIES or name in TEXTS else ", or take one of those that `penstock models` lists"
    message = f"model architecture {name} is run by transformers, {why}: install penstock[transformers]{others}"
    return PenstockError(ErrorCode.UNIMPLEMENTED, message, param="model_impl")
