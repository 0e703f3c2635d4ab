"""Calls with one answer: the method, the message and how the answer is read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from contract.v1 import inference_pb2, status_pb2
from penstock.client.wire import ServedModel

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Question(Generic[R]):
    """One call."""

    method: str  # of `penstock.v1.Inference`
    message: Any
    read: Callable[[Any], R]
    timeout_s: float | None = None  # None: that of the client


def ask_cancel(request_id: str) -> Question[bool]:
    """The end of a request; answered by whether there is such a one."""
    return Question("Cancel", inference_pb2.CancelCall(request_id=request_id), lambda reply: bool(reply.known))


def ask_models() -> Question[list[ServedModel]]:
    """The models that are served."""

    def read(reply: inference_pb2.ListModelsReply) -> list[ServedModel]:
        return [ServedModel(model.name, model.max_model_len) for model in reply.models]

    return Question("ListModels", inference_pb2.ListModelsCall(), read)


def ask_pipeline(pool: str) -> Question[status_pb2.PipelineStatus]:
    """The state of a pipeline."""
    return Question("GetPipeline", inference_pb2.GetPipelineCall(pool=pool), lambda reply: reply)
