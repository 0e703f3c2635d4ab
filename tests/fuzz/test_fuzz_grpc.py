"""Random bytes and mutated messages to every method of every service: a typed error or an answer, and life goes on."""

import random
from collections.abc import Iterator

import grpc
import pytest
from fired_at import FiredAt
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from mutations import ROUNDS, SEED, fill, mutated, random_bytes

from contract.domain.errors import ERROR_KINDS, ErrorCode
from contract.v1 import common_pb2, detokenizer_pb2, inference_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2

LIMIT_S = 300.0
MODULES = (inference_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2, detokenizer_pb2)
# These may go on for ever; the test waits for so long.
ENDLESS = ("Generate", "Resume", "Stream")
PATIENCE_S = 3.0
METHODS = [
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # does what it says
]


def payloads(dice: random.Random, method: MethodDescriptor) -> Iterator[bytes]:
    """As many as there are rounds: valid by type, mutated, and nothing at all like it."""
    factory = message_factory.GetMessageClass(method.input_type)
    for _ in range(ROUNDS):
        valid = fill(dice, factory()).SerializeToString()
        yield dice.choice((valid, mutated(dice, valid), random_bytes(dice)))


def outcome(channel: grpc.Channel, method: MethodDescriptor, payload: bytes) -> tuple[grpc.StatusCode, bytes]:
    """The status, and the trailer that says more."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    timeout_s = PATIENCE_S if method.name in ENDLESS else LIMIT_S
    try:
        if method.server_streaming:
            list(channel.unary_stream(name)(payload, timeout=timeout_s))
        else:
            channel.unary_unary(name)(payload, timeout=timeout_s)
    except grpc.RpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get("penstock-error-bin", b"")
    return grpc.StatusCode.OK, b""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name.removeprefix("penstock.v1."))
def test_every_method_answers_or_says_what_is_wrong(pipeline: FiredAt, method: MethodDescriptor) -> None:
    is_gateway = method.containing_service.name == "Inference"
    port = pipeline.gateway_port if is_gateway else pipeline.control_port
    dice = random.Random(f"{SEED} {method.full_name}")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for payload in payloads(dice, method):
            status, trailer = outcome(channel, method, payload)
            if status is grpc.StatusCode.DEADLINE_EXCEEDED and not trailer:
                assert method.name in ENDLESS, payload
            elif status is not grpc.StatusCode.OK:
                told = common_pb2.Error.FromString(trailer)
                assert told.message, (payload, status)
                assert told.code != common_pb2.ERROR_CODE_INTERNAL, (payload, told)
                assert ERROR_KINDS[ErrorCode(told.code)].grpc_status == status.name
    pipeline.check_alive()


def test_a_method_that_is_not_there_is_said_to_be_missing(pipeline: FiredAt) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{pipeline.gateway_port}") as channel:
        for name in ("/penstock.v1.Inference/Nothing", "/nothing", "/a/b/c"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(name)(b"x", timeout=LIMIT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    pipeline.check_alive()
