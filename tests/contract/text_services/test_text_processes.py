"""The two services as processes know them: gRPC, metrics, and what they do not import."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from text_pipeline import SCHEDULER, Pool, eventually, text_of

from contract.domain.errors import ErrorCode
from contract.domain.request import Prompt
from contract.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from servicekit.bus import open_bus
from servicekit.bus.calls import Claim, RequestState
from servicekit.lifecycle import EXIT_CANNOT_START
from servicekit.metrics import make_registry
from servicekit.rpc import RpcServer
from tokenizer_svc.servicer import rpc_service


@pytest.mark.parametrize("service", ["tokenizer_svc", "detokenizer_svc"])
def test_neither_service_imports_torch_or_transformers(service: str) -> None:
    program = (
        f"import sys, {service}.__main__; "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tokenizers_grpc_service_uses_the_pipelines_core(pool: Pool) -> None:
    service = rpc_service(pool.tokenizer_service().prompts)

    async def calls() -> None:
        server = RpcServer([service])
        port = await server.start("127.0.0.1:0")
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = tokenizer_pb2_grpc.TokenizerStub(channel)
            tokens = await stub.Tokenize(tokenizer_pb2.TokenizeCall(text="the mill"))
            assert np.frombuffer(tokens.token_ids, "<u4").tolist() == pool.ids("the mill")
            text = await stub.Detokenize(tokenizer_pb2.DetokenizeCall(token_ids=tokens.token_ids))
            assert text.text == "the mill"
            for wrong in (b"\x01", np.array([5_000], "<u4").tobytes()):
                with pytest.raises(grpc.RpcError) as caught:
                    await stub.Detokenize(tokenizer_pb2.DetokenizeCall(token_ids=wrong))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            call = tokenizer_pb2.ApplyChatTemplateCall()
            call.messages.messages.add(role="user", content="hi")
            with pytest.raises(grpc.RpcError) as caught:
                await stub.ApplyChatTemplate(call)
            assert "no chat template" in caught.value.details()
        await server.stop(0)

    asyncio.run(calls())


def test_metrics_can_be_scraped(pool: Pool) -> None:
    for service in (pool.tokenizer_service(), pool.detokenizer_service()):
        names = {metric.name for metric in make_registry(service.collectors()).collect()}
        assert {"penstock_hop_wait_seconds", "penstock_hop_work_seconds", "penstock_dead_letters"} <= names
    assert {"penstock_detokenized_tokens", "penstock_live_requests", "penstock_rejected_rows"} <= names


@contextmanager
def process(service: str, *flags: str) -> Iterator[None]:
    """A service in a process of its own, which ends in order."""
    started = subprocess.Popen([sys.executable, "-m", service, *flags])
    try:
        yield
        started.send_signal(signal.SIGTERM)
        assert started.wait(300) == 0
    finally:
        started.kill()
        started.wait()


def test_two_processes_on_a_server_bring_a_prompt_to_its_end(model: Path, valkey: str) -> None:
    pool = Pool(model, open_bus(valkey))
    flags = ("--model", str(model), "--redis-url", valkey, "--log-level", "warning")
    with closing(pool.connection), process("tokenizer_svc", *flags), process("detokenizer_svc", *flags):
        good = pool.submit(1, Prompt(text="the old mill"), stop=["brook"])
        wrong = pool.submit(2, Prompt(token_ids=(9_999,)))
        eventually(lambda: pool.fetch(good).state is RequestState.READY)
        assert isinstance(pool.connection.call(Claim(SCHEDULER, 1, 0)), list)
        pool.generate(good, "stands by the brook", end=0)
        assert text_of(pool.read_until_end(good)) == "stands by the "
        (ended,) = pool.result(wrong)
        assert ended.error is not None
        assert ended.error.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", ["tokenizer_svc", "detokenizer_svc"])
def test_a_missing_model_is_said_in_a_sentence(service: str) -> None:
    command = [sys.executable, "-m", service, "--model", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_CANNOT_START
    assert done.stderr.startswith(f"{service}: ")
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
