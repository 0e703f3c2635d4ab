"""Typed gRPC clients of a gateway: `Client` blocks, `AsyncClient` awaits; both speak `penstock.v1.Inference`."""

from penstock.client.asynchronous import AsyncClient
from penstock.client.synchronous import Client
from penstock.client.tls import ClientTls
from penstock.client.wire import Accepted, Delta, Embedding, Generation, PromptPart, ServedModel

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "ClientTls",
    "Delta",
    "Embedding",
    "Generation",
    "PromptPart",
    "ServedModel",
]
