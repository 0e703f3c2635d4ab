"""Typed gRPC clients of a gateway: `Client` blocks, `AsyncClient` awaits; both speak `penstock.v1.Inference`."""

from penstock.client.asynchronous import AsyncClient
from penstock.client.chats import ChatChoice, ChatReply, ToolCall
from penstock.client.events import Accepted, ChatDelta, Delta, PromptPart, ToolCallDelta
from penstock.client.synchronous import Client
from penstock.client.tls import ClientTls
from penstock.client.vectors import Embedding, RankedDocument, Ranking, Scores
from penstock.client.vocabulary import Rendered
from penstock.client.wire import Generation, ServedModel

__all__ = [
    "Accepted",
    "AsyncClient",
    "ChatChoice",
    "ChatDelta",
    "ChatReply",
    "Client",
    "ClientTls",
    "Delta",
    "Embedding",
    "Generation",
    "PromptPart",
    "RankedDocument",
    "Ranking",
    "Rendered",
    "Scores",
    "ServedModel",
    "ToolCall",
    "ToolCallDelta",
]
