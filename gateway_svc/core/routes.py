"""The pool that answers to each model name."""

from dataclasses import dataclass, field

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.generation_defaults import GenerationDefaults
from contract.domain.pooling import PoolingFacts
from gateway_svc.core.formats.choice import ModelFormats
from gateway_svc.core.models import Catalogue, ListedModel


@dataclass(frozen=True, slots=True)
class Offer:
    """The models of one pool."""

    pool: str
    catalogue: Catalogue
    is_named: bool = False  # by the operator; else workers have registered it


@dataclass(frozen=True, slots=True)
class Routes:
    """The models of all pools. A name goes to the pool that the operator named for it, else to the first with it."""

    offers: tuple[Offer, ...]  # in the order in which the operator gives them; one at least
    _by_model: dict[str, Offer] = field(init=False)

    def __post_init__(self) -> None:
        """Finds out who has which name."""
        by_model: dict[str, Offer] = {}
        for offer in sorted(self.offers, key=lambda each: not each.is_named):
            for model in offer.catalogue.models:
                by_model.setdefault(model.name, offer)
        object.__setattr__(self, "_by_model", by_model)

    def find(self, name: str) -> Offer:
        """The offer that a model of this name is in; an empty name is the first model of the first pool.

        Raises:
            PenstockError: MODEL_NOT_FOUND, or UNAVAILABLE if a pool has not told its models so far.
        """
        offer = self._by_model.get(name)
        if offer is None and (not name or len(self.offers) == 1):
            offer = self.offers[0]
        if offer is None:
            raise self._unknown(name)
        return offer

    def defaults(self, name: str) -> GenerationDefaults:
        """The parameters that hold for a model of this name where a request says nothing.

        Raises:
            PenstockError: as `find`; UNAVAILABLE: nobody has said them yet.
        """
        return self.find(name).catalogue.defaults

    def formats(self, name: str) -> ModelFormats:
        """The formats in which outputs of a model of this name are read.

        Raises:
            PenstockError: as `find`.
        """
        return self.find(name).catalogue.formats

    def pooling(self, name: str) -> PoolingFacts:
        """The pooling of prompts by a model of this name where a request does not say otherwise.

        Raises:
            PenstockError: as `defaults`.
        """
        return self.find(name).catalogue.pooling

    @property
    def models(self) -> list[tuple[ListedModel, Offer]]:
        """All models, each with the offer that it is in."""
        return [
            (model, offer)
            for offer in self.offers
            for model in offer.catalogue.models
            if self._by_model[model.name] is offer
        ]

    @property
    def contested(self) -> dict[str, tuple[str, ...]]:
        """Pools by the name of a model that several have; the first has it."""
        found: dict[str, list[str]] = {name: [offer.pool] for name, offer in self._by_model.items()}
        for offer in self.offers:
            for model in offer.catalogue.models:
                if offer.pool not in found[model.name]:
                    found[model.name].append(offer.pool)
        return {name: tuple(pools) for name, pools in found.items() if len(pools) > 1}

    def _unknown(self, name: str) -> PenstockError:
        if silent := [each.pool for each in self.offers if not each.catalogue.models]:
            return PenstockError(
                ErrorCode.UNAVAILABLE,
                f"the model {name[:200]!r} is in no pool that is known, and no worker of {', '.join(silent)} has "
                "registered one yet: send the request again later, or have the operator name that pool's `models`",
            )
        served = ", ".join(repr(model.name) for model, _ in self.models)
        return PenstockError(
            ErrorCode.MODEL_NOT_FOUND, f"the model {name[:200]!r} is not served here; there is {served}", param="model"
        )
