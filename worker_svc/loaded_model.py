"""A model with its weights, and what computes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from contract.domain.model_kind import ModelKind
from servicekit.checkpoint.model import Checkpoint
from worker_svc.compute import Compute
from worker_svc.core.distributed import Group
from worker_svc.core.encoder import Encoder
from worker_svc.core.kv_cache import KVCacheShape
from worker_svc.core.language_model import LanguageModel
from worker_svc.core.memory import Budget
from worker_svc.core.states.slot_states import StateShape
from worker_svc.runner_options import RunnerOptions


@dataclass(frozen=True, slots=True)
class ModelSource:
    """All that a model is loaded from, and onto."""

    options: RunnerOptions
    checkpoint: Checkpoint
    max_model_len: int
    device: torch.device
    group: Group
    budget: Budget | None  # of a GPU

    @property
    def directory(self) -> Path:
        """Of the checkpoint."""
        return self.checkpoint.directory

    @property
    def is_random(self) -> bool:
        """Return whether weights are drawn instead of read."""
        return self.options.load_format == "dummy"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """This rank's part of a model."""

    model: LanguageModel
    compute: Compute
    shape: KVCacheShape
    state: StateShape | None  # of a sequence, in layers that keep one; None: none does
    num_heads: int  # query heads of this rank
    weights_bytes: int
    dtype: torch.dtype
    implementation: str  # penstock or transformers
    precision: str  # the dtype, and the format where it is not that of the checkpoint


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder, whose prompts are computed whole: nothing of them is kept."""

    model: Encoder
    kind: ModelKind
    num_layer_weights: int  # numbers that its layers multiply a token with
    longest_prompt: int  # tokens
    weights_bytes: int
    dtype: torch.dtype
    precision: str  # the dtype


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The facts of a model that are known before it is loaded."""

    architecture: str
    implementation: str  # penstock or transformers
    layers: int
    quantization: str | None
    memory_bytes: int  # of this rank's weights


class Loader(Protocol):
    """The way to load one checkpoint, about which all is read but its weights."""

    def describe(self, options: RunnerOptions, device: torch.device) -> ModelDescription:
        """The model as it would be on such a device."""

    def load(self, source: ModelSource) -> LoadedModel | LoadedEncoder:
        """Choose what computes, make room for the weights and fill it.

        Raises:
            PenstockError: see `load_runner`.
        """
