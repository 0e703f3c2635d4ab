"""Which model names are answered to."""

from dataclasses import dataclass
from pathlib import PurePath

from penstock.domain.errors import ErrorCode, PenstockError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as clients see it."""

    name: str
    max_model_len: int  # tokens of prompt and output together; 0: no worker has said it yet
    created_s: int  # Unix time, seconds
    root: str | None = None  # the directory or hub id that workers load; None: no worker has said it yet


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names given to the gateway (all for the one model of the pool), else those that workers registered."""

    models: tuple[ServedModel, ...] = ()

    def find(self, name: str) -> ServedModel:
        """The model of this name; an empty name is the first.

        Raises:
            PenstockError: MODEL_NOT_FOUND, or UNAVAILABLE if no model is known yet.
        """
        if not self.models:
            raise PenstockError(
                ErrorCode.UNAVAILABLE, "no worker has registered a model yet and --served-model-name was not given"
            )
        if not name:
            return self.models[0]
        for model in self.models:
            if model.name == name:
                return model
        served = ", ".join(repr(model.name) for model in self.models)
        raise PenstockError(
            ErrorCode.MODEL_NOT_FOUND, f"the model {name[:200]!r} is not served here; there is {served}", param="model"
        )


def catalogue(names: tuple[str, ...], workers: list[tuple[str, int]], started_s: int) -> Catalogue:
    """`workers` are (model, max_model_len) of those that registered; several that serve one model: the least length."""
    lengths: dict[str, int] = {}
    roots: dict[str, str] = {}
    for model, length in workers:
        name = served_name(model)
        lengths[name] = min(length, lengths.get(name, length))
        roots.setdefault(name, model)
    shortest, any_root = min(lengths.values(), default=0), next(iter(roots.values()), None)
    if not names:
        return Catalogue(tuple(ServedModel(each, lengths[each], started_s, roots[each]) for each in sorted(lengths)))
    return Catalogue(
        tuple(ServedModel(each, lengths.get(each, shortest), started_s, roots.get(each, any_root)) for each in names)
    )


def served_name(model: str) -> str:
    """What clients call a model: the last part of a directory's path; a hub id as it is."""
    path = PurePath(model)
    return path.name if path.is_absolute() or model.startswith(".") else model
