"""The connection for an event loop: calls of many tasks are pipelined, replies parsed by hiredis."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import hiredis

from servicekit.bus.call_times import CallTimes
from servicekit.bus.calls import Call
from servicekit.bus.commands import Command, Commands, block_s, pack
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.library import Library
from servicekit.bus.redis_address import CONNECT_TIMEOUT_S, RedisAddress
from servicekit.bus.redis_finder import AddressFinder
from servicekit.bus.redis_handshake import PATIENCE_S, BusMoved, bus_error, check_replies, first_commands, load_library
from servicekit.bus.replies import Reply
from servicekit.stall import RunningTimeout

R = TypeVar("R")


@dataclass(slots=True)
class _Exchange:
    """Commands that were sent together, until all are answered."""

    num_replies: int
    done: asyncio.Future[list[Reply]]
    replies: list[Reply] = field(default_factory=list)


class _Wire(asyncio.Protocol):
    """One socket: replies come in the order of the commands."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._exchanges: deque[_Exchange] = deque()
        self._gone = asyncio.Event()
        self.is_loss_told = False  # some call has failed by it

    @property
    def is_lost(self) -> bool:
        return self._transport is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, exchanges = self._reader, self._exchanges
        reader.feed(data)
        while exchanges:
            try:
                reply = reader.gets()
            except hiredis.ProtocolError as error:
                self.drop(error)
                return
            if reply is False:
                return
            exchange = exchanges[0]
            exchange.replies.append(reply)
            if len(exchange.replies) == exchange.num_replies:
                exchanges.popleft()
                if not exchange.done.done():
                    exchange.done.set_result(exchange.replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(error)
        self._gone.set()

    async def close(self) -> None:
        """Gives up, and waits until the socket is closed."""
        self.drop(None)
        await self._gone.wait()

    def drop(self, error: Exception | None) -> None:
        """Gives up: whatever waits gets BusUnavailable."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        self.is_loss_told |= bool(self._exchanges)
        while self._exchanges:
            if not (done := self._exchanges.popleft().done).done():
                done.set_exception(BusUnavailable(f"the connection to the bus at {self._address} was lost: {error}"))

    def post(self, packed: bytes) -> None:
        """Sends a command whose reply is dropped."""
        if self._transport is not None:
            exchange = _Exchange(1, asyncio.get_running_loop().create_future())
            exchange.done.cancel()
            self._exchanges.append(exchange)
            self._transport.write(packed)

    async def exchange(self, packed: list[bytes], patience_s: float) -> list[Reply]:
        """Sends commands in one write and waits for as many replies."""
        if self._transport is None:
            raise BusUnavailable(f"the connection to the bus at {self._address} was lost")
        exchange = _Exchange(len(packed), asyncio.get_running_loop().create_future())
        self._exchanges.append(exchange)
        self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))
        try:
            async with RunningTimeout(patience_s):
                return await exchange.done
        except TimeoutError as error:
            self.drop(error)
            raise BusUnavailable(f"the bus at {self._address} does not answer") from error


class AsyncRedisConnection:
    """A connection for one event loop; reconnects by itself, after some call has failed by the loss."""

    def __init__(self, finder: AddressFinder, commands: Commands, library: Library, call_times: CallTimes) -> None:
        self._finder = finder  # says where the server is, before each attempt to connect
        self._address = RedisAddress()
        self._commands = commands
        self._library = library
        self._call_times = call_times  # where is noted how long the server takes to answer
        self._wire: _Wire | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def call(self, call: Call[R]) -> R:
        """Carries out one call.

        Raises:
            BusUnavailable: the server is gone.
            BusFull: the server is out of memory.
        """
        return cast(R, (await self.execute((call,)))[0])

    async def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls in order, in one write.

        Raises:
            BusUnavailable: the server is gone; what was sent may or may not have been done.
            BusFull: the server is out of memory; the other calls were carried out.
        """
        if not calls:
            return []
        wire = self._wire
        if wire is not None and wire.is_lost and not wire.is_loss_told:
            wire.is_loss_told = True  # who uses it must learn that the server may be another run
            raise BusUnavailable(f"the connection to the bus at {self._address} was lost")
        if wire is None or wire.is_lost:
            wire = await self.connected()
        commands = self._commands
        patience_s = PATIENCE_S + block_s(calls[-1])
        began_s = time.perf_counter()
        replies = await wire.exchange([commands.encode(call) for call in calls], patience_s)
        if not block_s(calls[-1]):  # else the last answer, for which is waited here, says nothing of the server
            self._call_times.observe(calls, time.perf_counter() - began_s)
        answers: list[Any] = []
        failure: Exception | None = None
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError) and (fix := commands.repair(call, reply)):
                reply = (await wire.exchange(fix, patience_s))[-1]  # noqa: PLW2901
            if isinstance(reply, hiredis.ReplyError):
                failure = failure or bus_error(self._address, reply)
            else:
                answers.append(commands.decode(call, reply))
        if isinstance(failure, BusUnavailable):
            # What it is not ready for may be so for good: a demoted primary. The next connection may find another.
            wire.drop(failure)
            wire.is_loss_told = True
        if failure:
            raise failure
        return answers

    def drop(self) -> None:
        """Gives up the connection as it is; the next call makes a new one, to wherever the server is then.

        For who has waited for it long enough. Calls in flight raise BusUnavailable.
        """
        if self._wire is not None:
            self._wire.drop(None)
            self._wire.is_loss_told = True

    def post(self, call: Call[Any]) -> None:
        """Sends a call whose answer nobody needs, at once. Whether it arrives is not told."""
        if self._wire is not None:
            self._wire.post(self._commands.encode(call))

    async def connected(self) -> _Wire:
        """The wire, after one attempt to connect if there is none.

        Raises:
            BusUnavailable: closed, or the server cannot be reached.
        """
        async with self._connecting:
            if self._closed:
                raise BusUnavailable(f"the connection to the bus at {self._address} was closed")
            if self._wire is None or self._wire.is_lost:
                self._wire = await self._connect()
            return self._wire

    async def close(self) -> None:
        """Closes; calls in flight raise BusUnavailable."""
        self._closed = True
        if self._wire:
            await self._wire.close()

    async def _connect(self) -> _Wire:
        finder = self._finder
        self._address = await asyncio.to_thread(finder.find) if finder.asks else finder.find()
        try:
            return await self._connect_there()
        except BusMoved:
            self._address = await asyncio.to_thread(finder.find_moved, self._commands.run_key)
            return await self._connect_there()

    async def _connect_there(self) -> _Wire:
        address, loop = self._address, asyncio.get_running_loop()
        wire = _Wire(address)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if address.path:
                    await loop.create_unix_connection(lambda: wire, address.path)
                else:
                    await loop.create_connection(lambda: wire, address.host, address.port, ssl=address.tls)
        except OSError as error:
            self._finder.give_up()
            raise BusUnavailable(f"the bus at {address} cannot be reached: {error}") from error
        try:
            first = await self._first_commands()
            replies = await wire.exchange([pack(command) for command in first], PATIENCE_S)
            check_replies(address, replies)
            if not replies[-1]:
                check_replies(address, await wire.exchange([pack(load_library(self._library))], PATIENCE_S))
        except BaseException as error:
            wire.drop(error if isinstance(error, Exception) else None)
            raise
        return wire

    async def _first_commands(self) -> list[Command]:
        arguments = (self._address, self._library, self._commands.run_key)
        if self._address.credentials is None:
            return first_commands(*arguments)
        return await asyncio.to_thread(first_commands, *arguments)  # who is asked for them may take its time
