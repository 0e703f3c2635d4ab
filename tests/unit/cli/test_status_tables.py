from rich.console import Console

from contract.domain.generation_defaults import GenerationDefaults
from contract.v1 import status_pb2
from contract.wire.generation_defaults import encode_defaults
from penstock.cli.status import Rate, is_complete, render, total

KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


def pipeline() -> status_pb2.PipelineStatus:
    status = status_pb2.PipelineStatus(pool="pool-a")
    status.streams.add(stream="prompts", length=3)
    status.streams.add(stream="dead", length=1)
    for kind in reversed(KINDS):
        session = status.sessions.add(kind=kind, name=f"{kind}-0", address="10.0.0.1:50051", alive=True)
        session.status.ready = True
        session.status.hops.add(hop=f"read by {kind}", wait_p50_s=25e-6, wait_p99_s=0.0015, rate=1234.5)
    for session in status.sessions:
        if session.kind == "scheduler":
            figures = {"running": 2, "waiting": 7, "blocks_used": 10, "blocks_cached": 5, "blocks_total": 40}
            session.status.figures.update(figures | {"generated_tokens_total": 1000})
    return status


def shown(status: status_pb2.PipelineStatus, tokens_per_s: float | None = None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(render(status, tokens_per_s))
    return console.export_text()


def test_figures_of_the_whole_pipeline() -> None:
    text = shown(pipeline(), 1234.0)
    for words in (
        "pool-a",
        "7 sequences",
        "2 sequences",
        "10 used, 5 cached of 40 (25.0%)",
        "1,234 tok/s",
        "1000 tokens",
    ):
        assert words in text


def test_services_stand_in_the_order_of_a_request_whatever_order_they_come_in() -> None:
    text = shown(pipeline())
    positions = [text.index(f"{kind}-0") for kind in KINDS]
    assert positions == sorted(positions)
    assert "1,234.5" in text
    assert "25 µs" in text
    assert "1.5 ms" in text


def test_a_session_that_is_gone_counts_for_nothing() -> None:
    status = pipeline()
    assert is_complete(status)
    scheduler = next(session for session in status.sessions if session.kind == "scheduler")
    scheduler.alive = False
    assert "gone" in shown(status)
    assert total(status, "running") == 0
    assert not is_complete(status)


def test_a_session_that_is_not_ready_makes_the_pipeline_incomplete() -> None:
    status = pipeline()
    status.sessions[0].status.ready = False
    assert "not ready" in shown(status)
    assert not is_complete(status)


def test_an_empty_pool_can_be_shown() -> None:
    assert "0.0%" in shown(status_pb2.PipelineStatus())


def test_rate_needs_two_looks_and_a_count_that_grows() -> None:
    rate = Rate()
    assert rate.observe(100, 1.0) is None
    assert rate.observe(150, 2.0) == 50.0
    assert rate.observe(10, 3.0) is None
    assert rate.observe(20, 5.0) == 5.0


def test_the_models_defaults_are_told() -> None:
    status = pipeline()
    assert "model's defaults" in shown(status)
    (tokenizer,) = (each for each in status.sessions if each.kind == "tokenizer")
    tokenizer.status.generation_defaults.SetInParent()
    assert "OpenAI's" in shown(status)
    defaults = GenerationDefaults(temperature=0.6, top_k=20, suppress_tokens=(1, 2))
    tokenizer.status.generation_defaults.CopyFrom(encode_defaults(defaults))
    assert "temperature 0.6, top_k 20, suppress_tokens 2 tokens" in shown(status)
