"""Penstock: large language models served as a pipeline of small services over Redis Streams."""

from typing import TYPE_CHECKING, Any

from contract import __version__
from contract.domain.errors import PenstockError
from contract.domain.params import SamplingParams
from contract.domain.pooling import PoolingParams
from contract.domain.repetition import RepetitionDetectionParams
from contract.domain.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from penstock.async_llm import AsyncLLM
    from penstock.beam_search import BeamSearchOutput, BeamSearchParams
    from penstock.client import AsyncClient, Client
    from penstock.engine import LLMEngine
    from penstock.llm import LLM
    from penstock.outputs import CompletionOutput, Logprob, RequestOutput
    from penstock.pooled_outputs import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Client",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "Logprob",
    "PenstockError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]

# Resolved on first use: the command line must not pay for torch, which `LLM` needs.
_LAZY = {
    "LLM": "penstock.llm",
    "AsyncLLM": "penstock.async_llm",
    "BeamSearchOutput": "penstock.beam_search",
    "BeamSearchParams": "penstock.beam_search",
    "LLMEngine": "penstock.engine",
    "Client": "penstock.client",
    "AsyncClient": "penstock.client",
    "RequestOutput": "penstock.outputs",
    "CompletionOutput": "penstock.outputs",
    "Logprob": "penstock.outputs",
    "EmbeddingRequestOutput": "penstock.pooled_outputs",
    "PoolingRequestOutput": "penstock.pooled_outputs",
    "ScoringRequestOutput": "penstock.pooled_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  (only when something heavy is asked for)

    return getattr(import_module(_LAZY[name]), name)
