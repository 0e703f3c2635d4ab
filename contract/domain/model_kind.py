"""Kinds of models, by what they make of prompts."""

from enum import IntEnum

from contract.domain.errors import PenstockError, invalid


class ModelKind(IntEnum):
    """The kind of a model; the numbers are those of `penstock.v1.ModelKind`."""

    DECODER = 1  # tokens see those before them: it generates, or its hidden states are pooled
    ENCODER = 2  # tokens see those after them too: its hidden states are pooled, and nothing is generated
    CROSS_ENCODER = 3  # likewise, but a prompt is a pair of texts, to which its head gives a score

    @property
    def computes_whole_prompts(self) -> bool:
        """Return whether a prompt is computed in one step, and no keys and values are kept of it."""
        return self is not ModelKind.DECODER


_USES = {
    ModelKind.DECODER: "is a decoder, which scores no pairs of texts by itself: ask for embeddings of each",
    ModelKind.ENCODER: "is an encoder, which makes vectors of prompts and generates nothing: ask for embeddings (POST "
    "/v1/embeddings, or LLM.embed)",
    ModelKind.CROSS_ENCODER: "is a cross-encoder, which scores pairs of texts and does nothing else: ask for scores or "
    "a ranking (POST /v1/score, POST /v1/rerank, or LLM.score)",
}


def wrong_kind(kind: ModelKind, model: str = "") -> PenstockError:
    """The error of a request for what a model of this kind does not do. `model`: its name; empty: that is of no use to
    the caller."""
    named = f"the model {model[:200]!r}" if model else "the model"
    return invalid(f"{named} {_USES[kind]}", "model")
