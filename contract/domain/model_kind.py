"""Kinds of models, by what they make of prompts."""

from enum import IntEnum


class ModelKind(IntEnum):
    """The kind of a model; the numbers are those of `penstock.v1.ModelKind`."""

    DECODER = 1  # tokens see those before them: it generates, or its hidden states are pooled
    ENCODER = 2  # tokens see those after them too: its hidden states are pooled, and nothing is generated

    @property
    def computes_whole_prompts(self) -> bool:
        """Return whether a prompt is computed in one step, and no keys and values are kept of it."""
        return self is not ModelKind.DECODER
