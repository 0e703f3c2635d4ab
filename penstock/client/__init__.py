"""Typed gRPC clients of a gateway: `Client` blocks, `AsyncClient` awaits; both speak `penstock.v1.Inference`."""

from penstock.client.asynchronous import AsyncClient
from penstock.client.synchronous import Client
from penstock.client.tls import ClientTls
from penstock.client.wire import Accepted, Delta, Generation, PromptPart, ServedModel

__all__ = ["Accepted", "AsyncClient", "Client", "ClientTls", "Delta", "Generation", "PromptPart", "ServedModel"]
