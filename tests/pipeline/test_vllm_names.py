"""With `--metrics-aliases vllm` a gateway tells of the whole pool under vLLM's names, and without it does not."""

import threading
from pathlib import Path

import httpx
import pytest
from in_memory import Pipeline, wait_until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from worker_gate import Gate

from gateway_svc.settings import GatewaySettings
from servicekit.settings import load

NUM_BLOCKS, BLOCK_SIZE = 64, 16
WORKER = {"runner": "simulated", "step_ms": 1.0, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 2}
LIMIT_S = 300
BODY = {"prompt": [1, 2, 3], "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def samples(pipeline: Pipeline) -> dict[str, tuple[dict[str, str], float]]:
    url = f"http://127.0.0.1:{pipeline.gateway.http_port}/metrics"
    plain = httpx.get(url, timeout=300).text
    page = httpx.get(url, timeout=300, headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
    families = list(read_openmetrics(page))
    assert "vllm_" not in page + plain, "escaped"
    names = {family.name for family in text_string_to_metric_families(plain) if family.name.startswith("vllm:")}
    assert len(names) == len({family.name for family in families if family.name.startswith("vllm:")})
    return {
        sample.name: (sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }


def test_what_the_pool_does_is_told_under_the_names_of_vllm(checkpoint: Path) -> None:
    gateway = {"metrics_aliases": "vllm", "served_model_name": ("story",)}
    gate, every = Gate(), {"session_ttl_s": 6.0}  # so that services tell their state each second
    with Pipeline(checkpoint, worker=WORKER, gateway=gateway, every=every, load=gate.load) as pipeline:
        url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions"
        clients = [
            threading.Thread(target=httpx.post, args=(url,), kwargs={"json": BODY, "timeout": 300}) for _ in range(3)
        ]
        for client in clients:
            client.start()

        def is_busy() -> bool:
            told = samples(pipeline)
            running, waiting = told["vllm:num_requests_running"][1], told["vllm:num_requests_waiting"][1]
            if (running, waiting) == (2, 1):
                return 0 < told["vllm:kv_cache_usage_perc"][1] < 1
            # Once all have come: who came later is planned after the steps that were planned before, and told of then.
            if running + waiting >= len(clients):
                gate.let_one_pass()
            return False

        wait_until(is_busy, LIMIT_S)
        told = samples(pipeline)
        assert told["vllm:num_requests_running"][0] == {"model_name": "story"}
        labels, value = told["vllm:cache_config_info"]
        assert (labels, value) == ({"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS)}, 1)
        gate.open()
        for client in clients:
            client.join()
        wait_until(lambda: samples(pipeline)["vllm:num_requests_running"][1] == 0, LIMIT_S)
        told = samples(pipeline)
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
            assert told[f"vllm:{name}_count"][1] == 3
        assert told["vllm:inter_token_latency_seconds_count"][1] > 0
        assert told["vllm:prompt_tokens_total"][1] == 9
        assert told["vllm:generation_tokens_total"][1] == 600


def test_nothing_has_names_of_vllm_unless_they_are_asked_for(checkpoint: Path) -> None:
    with Pipeline(checkpoint, worker=WORKER) as pipeline:
        assert samples(pipeline) == {}


@pytest.mark.parametrize("name", ["sglang", ""])
def test_other_names_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(GatewaySettings, ["--metrics-aliases", name], {})
    assert "--metrics-aliases" in capsys.readouterr().err
