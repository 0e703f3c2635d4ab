"""The model names that are answered to."""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.domain.chat_facts import UNKNOWN_CHAT, ChatFacts
from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.generation_defaults import GenerationDefaults
from contract.domain.model_kind import ModelKind
from contract.domain.model_name import served_name
from contract.domain.pooling import PLAIN_POOLING, PoolingFacts
from gateway_svc.core.formats.choice import NO_FORMATS, ModelFormats


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model as a worker has registered it."""

    root: str  # the directory or hub id that it has loaded
    max_model_len: int
    digest: str  # hexadecimal
    block_size: int = 0  # tokens of a KV block
    num_blocks: int = 0
    kind: ModelKind = ModelKind.DECODER


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that tokenizers tell of their model."""

    defaults: GenerationDefaults
    chat: ChatFacts = UNKNOWN_CHAT
    pooling: PoolingFacts = PLAIN_POOLING


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as clients see it."""

    name: str
    max_model_len: int  # tokens of prompt and output together; 0: no worker has said it yet
    created_s: int  # Unix time, seconds
    root: str | None = None  # the directory or hub id that workers load; None: no worker has said it yet
    digests: tuple[str, ...] = ()  # of what workers have loaded: two while one model replaces another
    kind: ModelKind | None = None  # None: no worker has said it yet


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names given to the gateway (all for the one model of the pool), else those that workers registered."""

    models: tuple[ListedModel, ...] = ()
    told_defaults: GenerationDefaults | None = None  # None: no tokenizer has said them yet
    formats: ModelFormats = NO_FORMATS  # in which outputs of chats are read
    told_pooling: PoolingFacts | None = None  # likewise

    @property
    def pooling(self) -> PoolingFacts:
        """The pooling of prompts where a request does not say otherwise.

        Raises:
            PenstockError: UNAVAILABLE: nobody has said it yet.
        """
        if self.told_pooling is None:
            raise _untold("how the model makes vectors")
        return self.told_pooling

    @property
    def defaults(self) -> GenerationDefaults:
        """The parameters that hold where a request does not say otherwise.

        Raises:
            PenstockError: UNAVAILABLE: nobody has said it yet.
        """
        if self.told_defaults is None:
            raise _untold("what the model's defaults are")
        return self.told_defaults

    def find(self, name: str) -> ListedModel:
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


def _untold(what: str) -> PenstockError:
    return PenstockError(ErrorCode.UNAVAILABLE, f"no tokenizer has said yet {what}; send it again later")


def catalogue(
    names: tuple[str, ...],
    workers: Sequence[OfferedModel],
    started_s: int,
    facts: ModelFacts | None = None,
    formats: ModelFormats = NO_FORMATS,
) -> Catalogue:
    """`workers` are what those that live have registered; several that serve one model: the least length."""
    lengths: dict[str, int] = {}
    roots: dict[str, str] = {}
    digests: dict[str, set[str]] = {}
    kinds = {served_name(worker.root): worker.kind for worker in workers}
    for worker in workers:
        name, length = served_name(worker.root), worker.max_model_len
        lengths[name] = min(length, lengths.get(name, length))
        roots.setdefault(name, worker.root)
        digests.setdefault(name, set()).add(worker.digest)
    shortest, any_root = min(lengths.values(), default=0), next(iter(roots.values()), None)
    any_kind = next(iter(kinds.values()), None)
    if not names:
        models = [
            ListedModel(each, lengths[each], started_s, roots[each], tuple(sorted(digests[each])), kinds[each])
            for each in sorted(lengths)
        ]
    else:
        all_digests = set[str]().union(*digests.values())
        models = [
            ListedModel(
                each,
                lengths.get(each, shortest),
                started_s,
                roots.get(each, any_root),
                tuple(sorted(digests.get(each, all_digests))),
                kinds.get(each, any_kind),
            )
            for each in names
        ]
    if facts is None:
        return Catalogue(tuple(models), formats=formats)
    return Catalogue(tuple(models), facts.defaults, formats, facts.pooling)
