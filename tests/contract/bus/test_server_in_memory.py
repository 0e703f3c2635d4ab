"""Values in Lua and in commands, the same on a server in memory as on Valkey and Redis: the functions rest on it."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import hiredis
import pytest
from hiredis import ReplyError
from memory_server import MemoryServer
from memory_store import Store

from servicekit.bus.commands import pack
from servicekit.bus.redis_address import parse_address

Words = Sequence[str | bytes | int]
Send = Callable[[Words], Any]  # a command; its reply, or the error that it was refused with

# What a function of a library returns, by what it is about. `key` may be written.
PROBES = {
    "whole numbers are replies, fractions are cut off": "return { 3, 3.9, -3.9, 2^31, 2^53, 0 - 0 }",
    "true is one, and false nothing": "return { true, false, 'x' }",
    "a list ends where nothing is": "return { 1, 2, nil, 4 }",
    "lists may be in lists": "return { {}, { 'a', { 1 } }, {} }",
    "nothing is nothing": "return nil",
    "bytes stay as they are": r"return '\0\255\r\n' .. string.char(1, 200)",
    "an error has its own code": "return redis.error_reply('SHAPE one two three')",
    "what is not there is false": "return { redis.call('GET', key) == false, redis.call('HGET', key, 'f') == false }",
    "lists have false where nothing is": """
        redis.call('HSET', key, 'a', 'x')
        local found = redis.call('HMGET', key, 'b', 'a', 'c')
        return { #found, found[1] == false, found[2], found[3] == false }""",
    "a status is a table": "return redis.call('SET', key, '1').ok",
    "whole numbers are written without a point": """
        redis.call('HSET', key, 'a', 7, 'b', 1700000000000, 'c', 2^53, 'd', -5, 'e', 14 / 2, 'f', 0 - 3)
        return redis.call('HMGET', key, 'a', 'b', 'c', 'd', 'e', 'f')""",
    "fractions are written so that they are read again": """
        redis.call('HSET', key, 'a', 0.5, 'b', 0.1, 'c', 1 / 3)
        local a, b, c = unpack(redis.call('HMGET', key, 'a', 'b', 'c'))
        return { a, tonumber(b) == 0.1 and 1 or 0, tonumber(c) == 1 / 3 and 1 or 0 }""",
    "Lua counts with the numbers of replies, and in what is read": """
        redis.call('HSET', key, 'n', '40')
        return { redis.call('HINCRBY', key, 'n', 1) + 1, redis.call('HGET', key, 'n') + 1, tostring(41), 41 .. '' }""",
    "large numbers are whole in text": "return { string.format('%.0f', 1700000000123), tostring(1700000000123) }",
    "time is two texts": """
        local time = redis.call('TIME')
        return { #time, type(time[1]), type(time[2]), time[1] * 1000 + math.floor(time[2] / 1000) > 1e12 }""",
    "lists of bytes are packed and unpacked": r"""
        redis.call('HSET', key, 'w', cmsgpack.pack({ '', 'aaaa\0\255', string.rep('b', 70000) }))
        local words = cmsgpack.unpack(redis.call('HGET', key, 'w'))
        return { #words, words[1], words[2], #words[3] }""",
    "scores are told as they are read": """
        redis.call('ZADD', key, 1700000000123, 'late', 2, 'early', 0.5, 'first')
        local found = redis.call('ZRANGEBYSCORE', key, '(0.5', '+inf', 'WITHSCORES', 'LIMIT', 0, 5)
        return { found, redis.call('ZRANGE', key, 0, 0, 'WITHSCORES') }""",
    "equal scores are in order of members": """
        for _, member in ipairs({ 'b', 'a', 'c' }) do redis.call('ZADD', key, '0', member) end
        return { redis.call('ZRANGE', key, '(a', '+', 'BYLEX', 'LIMIT', '0', 9),
          redis.call('ZRANGEBYSCORE', key, '-inf', 0, 'LIMIT', 1, 1) }""",
    "what is emptied is gone": """
        redis.call('HSET', key, 'a', 1)
        return { redis.call('HDEL', key, 'a', 'b'), redis.call('EXISTS', key), redis.call('SADD', key, 'a', 'b', 'a'),
          redis.call('SREM', key, 'b', 'c', 'a'), redis.call('EXISTS', key) }""",
    "an emptied stream is not": """
        local id = redis.call('XADD', key, '*', 'f', 'v')
        return { redis.call('XDEL', key, id, '1-1'), redis.call('EXISTS', key), redis.call('XLEN', key),
          redis.call('XINFO', 'STREAM', key)[1], redis.call('UNLINK', key, key .. '2'), redis.call('EXISTS', key) }""",
    "counts are of what is new": """
        return { redis.call('HSET', key, 'a', 1, 'b', 2), redis.call('HSET', key, 'b', 3, 'c', 4),
          redis.call('PEXPIRE', key, 0), redis.call('EXISTS', key), redis.call('PEXPIRE', key, 100) }""",
    "a value of another type is refused": "redis.call('SET', key, 'x') return redis.call('HGET', key, 'f')",
    "what is no text and no number is refused": "return redis.call('HSET', key, 'f', false)",
}
SOURCE = "#!lua name=probes\n" + "\n".join(
    f"""redis.register_function {{
      function_name = 'probe_{number}', callback = function(keys) local key = keys[1] {body} end }}"""
    for number, body in enumerate(PROBES.values())
)


def _on_a_server(url: str) -> Send:
    def send(words: Words) -> Any:
        reader = hiredis.Reader()
        with closing(parse_address(url).open_socket()) as connection:
            connection.sendall(pack(tuple(words)))
            while (reply := reader.gets()) is False:
                reader.feed(connection.recv(1 << 20))
        return reply

    return send


def _in_memory(server: MemoryServer) -> Send:
    def send(words: Words) -> Any:
        reader = hiredis.Reader()
        reader.feed(pack(tuple(words)))
        try:
            reply = server.execute(reader.gets())
        except ReplyError as error:
            return error
        return reply.encode() if isinstance(reply, str) else reply

    return send


@pytest.fixture(params=["valkey", "redis"])
def both(request: pytest.FixtureRequest) -> tuple[Send, Send]:
    """A server in memory and a real one, with the probes."""
    senders = (
        _in_memory(MemoryServer(Store(lambda: 1_700_000_000_000))),
        _on_a_server(request.getfixturevalue(f"{request.param}_url")),
    )
    for send in senders:
        send(["FUNCTION", "LOAD", "REPLACE", SOURCE])
    return senders


@pytest.mark.parametrize("number", range(len(PROBES)), ids=list(PROBES))
def test_a_function_has_the_same_result(number: int, both: tuple[Send, Send]) -> None:
    replies = []
    for send in both:
        send(["DEL", f"probe {number}"])
        replies.append(send(["FCALL", f"probe_{number}", 1, f"probe {number}"]))
    in_memory, real = replies
    if isinstance(real, ReplyError):
        assert isinstance(in_memory, ReplyError)
        assert str(in_memory).split()[0] == str(real).split()[0]
    else:
        assert in_memory == real
