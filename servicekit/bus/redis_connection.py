"""The lean blocking connection: commands packed once, one write per `execute`, replies parsed by hiredis."""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import hiredis

from servicekit.bus.call_times import CallTimes
from servicekit.bus.calls import Call
from servicekit.bus.commands import Commands, awake_s, block_s, pack
from servicekit.bus.interface import BusUnavailable
from servicekit.bus.library import Library
from servicekit.bus.redis_address import RedisAddress
from servicekit.bus.redis_finder import AddressFinder
from servicekit.bus.redis_handshake import PATIENCE_S, BusMoved, bus_error, check_replies, first_commands, load_library
from servicekit.bus.replies import Reply

R = TypeVar("R")

_TICK_S = 1.0
_READ_BYTES = 1 << 16


class RedisConnection:
    """A blocking connection, used by one thread at a time."""

    def __init__(
        self,
        finder: AddressFinder,
        commands: Commands,
        library: Library,
        call_times: CallTimes,
        *,
        busy_poll_s: float = 0.0,
    ) -> None:
        """Connects.

        Args:
            finder: says where the server is, before each attempt to connect.
            commands: how calls are written and answers read.
            library: the functions that the server must have.
            call_times: where is noted how long the server takes to answer.
            busy_poll_s: how long an answer is looked for without sleeping: saves a wake-up, costs a core meanwhile.

        Raises:
            BusUnavailable: the server cannot be reached.
        """
        self._finder = finder
        self._address = RedisAddress()
        self._busy_poll_s = busy_poll_s
        self._commands = commands
        self._library = library
        self._call_times = call_times
        self._answered_s = 0.0  # when the first answer of an exchange came; 0: not yet
        self._socket: socket.socket | None = None
        self._reader = hiredis.Reader()
        self._closed = False
        self._is_exchanging = False
        self._waited_ns = 0
        self._sent: Sequence[Call[Any]] = ()  # what is to be received
        self.reconnect()

    @property
    def waited_ns(self) -> int:
        """Until when its thread waited for the server last, monotonic; now, while it does; 0: never."""
        return time.monotonic_ns() if self._is_exchanging else self._waited_ns

    def call(self, call: Call[R]) -> R:
        """Carries out one call.

        Raises:
            BusUnavailable: the server is gone.
            BusFull: the server is out of memory.
        """
        return cast(R, self.execute((call,))[0])

    def execute(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Carries out calls in order, in one write.

        Raises:
            BusUnavailable: the server is gone; what was sent may or may not have been done.
            BusFull: the server is out of memory; the other calls were carried out.
        """
        if not calls:
            return []
        self._answered_s = 0.0
        began_s = time.perf_counter()
        self.send(calls)
        answers = self.receive()
        self._call_times.observe(calls, self._answered_s - began_s)
        return answers

    def send(self, calls: Sequence[Call[Any]]) -> None:
        """Sends calls in one write.

        Raises:
            BusUnavailable: the server is gone; what was sent may or may not have been done.
        """
        self._write([self._commands.encode(call) for call in calls])
        self._sent = calls

    def receive(self) -> list[Any]:
        """The answers to what was sent last.

        Raises:
            BusUnavailable: the server is gone; what was sent may or may not have been done.
            BusFull: the server is out of memory; the other calls were carried out.
        """
        calls, self._sent = self._sent, ()
        if not calls:
            return []
        commands, last = self._commands, calls[-1]
        patience_s = PATIENCE_S + block_s(last)
        replies = self._read(len(calls), patience_s, max(self._busy_poll_s, awake_s(last)))
        answers: list[Any] = []
        failure: Exception | None = None
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError):
                reply = self._repaired(call, reply)  # noqa: PLW2901
            if isinstance(reply, hiredis.ReplyError):
                failure = failure or bus_error(self._address, reply)
            else:
                answers.append(commands.decode(call, reply))
        if failure:
            raise failure
        return answers

    def reconnect(self) -> None:
        """Drops what is left of the connection and makes one attempt at a new one.

        Raises:
            BusUnavailable: not reachable yet.
        """
        self._drop()
        self._closed = False
        self._address = self._finder.find()
        try:
            self._connect()
        except BusMoved:
            self._drop()
            self._address = self._finder.find_moved(self._commands.run_key)
            self._connect()

    def _connect(self) -> None:
        try:
            self._socket = self._address.open_socket()
        except OSError as error:
            self._finder.give_up()
            raise BusUnavailable(f"the bus at {self._address} cannot be reached: {error}") from error
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(_TICK_S)
        else:
            # A blocking socket with a kernel timeout saves the poll() that Python makes before each recv().
            self._socket.settimeout(None)
            timeout = struct.pack("ll", int(_TICK_S), 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PATIENCE_S), 0))
        self._reader = hiredis.Reader()
        try:
            first = [pack(each) for each in first_commands(self._address, self._library, self._commands.run_key)]
            replies = self._exchange(first, PATIENCE_S)
            check_replies(self._address, replies)
            if not replies[-1]:
                check_replies(self._address, self._exchange([pack(load_library(self._library))], PATIENCE_S))
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """Closes; a thread blocked in `execute` gets BusUnavailable."""
        self._closed = True
        sock = self._socket
        if sock is None:
            return
        if not self._is_exchanging:
            self._drop()
            return
        with contextlib.suppress(OSError):  # lost already
            sock.shutdown(socket.SHUT_RDWR)  # wakes the other thread, which then closes it

    def _exchange(self, packed: list[bytes], patience_s: float) -> list[Reply]:
        """Sends commands in one write and reads as many replies."""
        self._write(packed)
        return self._read(len(packed), patience_s)

    def _write(self, packed: list[bytes]) -> None:
        sock = self._present()
        self._is_exchanging = True
        try:
            sock.sendall(packed[0] if len(packed) == 1 else b"".join(packed))
        except OSError as error:
            raise self._lost(error) from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._waited_ns = time.monotonic_ns()
            self._is_exchanging = False

    def _read(self, num_replies: int, patience_s: float, busy_poll_s: float = 0.0) -> list[Reply]:
        """So many replies, each of them without sleep for up to `busy_poll_s`."""
        sock, reader = self._present(), self._reader
        replies: list[Reply] = []
        waited_s = 0.0
        self._is_exchanging = True
        try:
            while len(replies) < num_replies:
                reply = reader.gets()
                if reply is not False:
                    replies.append(reply)
                    continue
                try:
                    data = self._poll(sock, busy_poll_s) or sock.recv(_READ_BYTES)
                except (BlockingIOError, TimeoutError):
                    waited_s += _TICK_S
                    if waited_s >= patience_s:
                        raise
                    continue
                if not self._answered_s:
                    self._answered_s = time.perf_counter()
                if not data:
                    raise ConnectionResetError("closed by the server")  # noqa: TRY301
                reader.feed(data)
        except (OSError, hiredis.ProtocolError) as error:
            raise self._lost(error) from error
        except BaseException:
            self._drop()  # an interrupted exchange leaves replies behind that belong to nobody
            raise
        finally:
            self._waited_ns = time.monotonic_ns()
            self._is_exchanging = False
        self._drop_if_closed()
        return replies

    def _present(self) -> socket.socket:
        if self._socket is None or self._closed:
            raise BusUnavailable(f"the connection to the bus at {self._address} was lost")
        return self._socket

    def _lost(self, error: Exception) -> BusUnavailable:
        self._drop()
        return BusUnavailable(f"the connection to the bus at {self._address} was lost: {error}")

    def _poll(self, sock: socket.socket, busy_poll_s: float) -> bytes:
        """The bytes that come within `busy_poll_s`, without going to sleep; nothing: see `recv`."""
        if not busy_poll_s or isinstance(sock, ssl.SSLSocket):
            return b""
        until_s = time.perf_counter() + busy_poll_s
        while time.perf_counter() < until_s:
            with contextlib.suppress(BlockingIOError):
                return sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        return b""

    def _repaired(self, call: Call[Any], error: Exception) -> Reply:
        commands = self._commands.repair(call, error)
        return error if commands is None else self._exchange(commands, PATIENCE_S + block_s(call))[-1]

    def _drop_if_closed(self) -> None:
        if self._closed:
            self._drop()

    def _drop(self) -> None:
        self._sent = ()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
