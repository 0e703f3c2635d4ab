"""Time to the first token of one request at a time, through HTTP and in one process."""

import socket
import time
from pathlib import Path

from bench.rig.services import Services
from bench.rig.streams import completion_prompt, completion_request
from contract.domain.params import SamplingParams
from contract.v1.status_pb2 import HopStatus
from penstock.client import Client
from penstock.llm import LLM

HOPS = ("prompts", "requests", "steps", "results", "tokens", "text")  # in the order of a request's way
STATUS_S = 2.0  # services tell about their hops with the renewal of their sessions


def measure_http(port: int, num_requests: int) -> list[float]:
    """Seconds from sending a streamed completion to its first event, on one connection that is kept."""
    times_s = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(num_requests):
            request = completion_request(number, num_tokens=2)
            began_s = time.perf_counter()
            connection.sendall(request)
            received = b""
            while b"data: " not in received:
                received += _receive(connection)
            times_s.append(time.perf_counter() - began_s)
            while not received.endswith(b"0\r\n\r\n"):
                received += _receive(connection)
            time.sleep(0.02)
    return times_s


def measure_engine(checkpoint: Path, step_s: float, num_requests: int) -> list[float]:
    """Seconds from `add_request` to the first output, with the same cores in this process."""
    engine = LLM(str(checkpoint), runner="simulated", step_ms=step_s * 1e3).llm_engine
    times_s = []
    for number in range(num_requests):
        began_s = time.perf_counter()
        engine.add_request(str(number), completion_prompt(number), SamplingParams(temperature=0, max_tokens=2))
        while not engine.step():
            pass
        times_s.append(time.perf_counter() - began_s)
        while engine.has_unfinished_requests():
            engine.step()
        time.sleep(0.02)
    engine.close()
    return times_s


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise SystemExit("the gateway closed the connection")
    return data


def hops_of(services: Services) -> list[HopStatus]:
    """The figures that all services tell of the hops that they read, once they have told the pool."""
    time.sleep(STATUS_S)
    with Client(f"127.0.0.1:{services.grpc_port}", timeout_s=10.0) as client:
        sessions = client.pipeline().sessions
    hops = [hop for session in sessions for hop in session.status.hops if hop.rate]
    return sorted(hops, key=lambda hop: HOPS.index(hop.hop) if hop.hop in HOPS else len(HOPS))
