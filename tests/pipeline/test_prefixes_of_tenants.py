"""The prefix cache tells tenants and salts apart, through all services."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from in_memory import Pipeline

from contract.domain.params import SamplingParams
from penstock.client import Client

PROMPT = list(range(40))
WORKER = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 8}


def asking(pipeline: Pipeline) -> Callable[..., int]:
    """Asks as a tenant, and tells how much of the prompt was cached."""

    def ask(tenant: str, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
        url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions"
        reply = httpx.post(url, json=body, headers={"x-penstock-tenant": tenant}, timeout=300).raise_for_status().json()
        found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    return ask


def test_a_tenant_does_not_see_what_another_has_asked(checkpoint: Path) -> None:
    with Pipeline(checkpoint, worker=WORKER, gateway={"trust_tenant_header": True}) as pipeline:
        ask = asking(pipeline)
        assert [ask(tenant) for tenant in ("a", "b", "a", "b")] == [0, 0, 36, 36]
        assert [ask("a", cache_salt=salt) for salt in ("x", "y", "x")] == [0, 0, 36]
        assert ask("b", cache_salt="x") == 0, "salts are a tenant's own"


def test_tenants_share_if_the_operator_says_so_and_salts_still_part_them(checkpoint: Path) -> None:
    scheduler = {"share_prefixes_between_tenants": True}
    with Pipeline(checkpoint, worker=WORKER, gateway={"trust_tenant_header": True}, scheduler=scheduler) as pipeline:
        ask = asking(pipeline)
        assert [ask(tenant) for tenant in ("a", "b")] == [0, 36]
        assert [ask("b", cache_salt="x"), ask("a", cache_salt="x")] == [0, 36]


def test_a_salt_comes_over_grpc_too(checkpoint: Path) -> None:
    with Pipeline(checkpoint, worker=WORKER) as pipeline:
        client: Client = pipeline.client
        cached = []
        for salt in (None, "x", None, "x"):
            usage = client.complete(PROMPT, SamplingParams(max_tokens=1), cache_salt=salt).usage
            assert usage is not None
            cached.append(usage.num_cached_tokens)
        assert cached == [0, 0, 36, 36]
