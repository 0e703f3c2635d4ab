"""The gRPC control service."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from contract.domain.errors import PenstockError
from contract.domain.request import parse_request_id
from contract.v1 import detokenizer_pb2, detokenizer_pb2_grpc, inference_pb2
from detokenizer_svc import wire
from detokenizer_svc.followers import Follower, Followers, Item
from servicekit.rpc import RpcService


class DetokenizerServicer(detokenizer_pb2_grpc.DetokenizerServicer):
    """`penstock.v1.Detokenizer`."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    async def Stream(  # noqa: N802
        self, request: detokenizer_pb2.DetokenizerStreamCall, _context: Any
    ) -> AsyncIterator[inference_pb2.Delta]:
        """A live request's text from an offset on, then what comes."""
        request_id = parse_request_id(request.request_id)
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Item] = asyncio.Queue()

        def deliver(item: Item) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(items.put_nowait, item)

        follower = Follower(request_id, request.from_offset, deliver)
        self._followers.join(follower)
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, PenstockError):
                    raise item
                yield wire.delta(item)
        finally:
            self._followers.leave(follower)


def rpc_service(followers: Followers) -> RpcService:
    """`penstock.v1.Detokenizer` for the process's gRPC server."""
    return RpcService(
        "penstock.v1.Detokenizer",
        detokenizer_pb2_grpc.add_DetokenizerServicer_to_server,
        DetokenizerServicer(followers),
    )
