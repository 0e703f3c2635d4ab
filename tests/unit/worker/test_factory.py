"""What is found out before a model is loaded."""

import logging
import subprocess
import sys
import time

import pytest
import torch

from penstock import LLM, PenstockError
from penstock.launcher.layout import BUNDLED_MODEL
from servicekit.checkpoint.model import read_checkpoint
from worker_svc import factory, native
from worker_svc.core.causal_lm import CausalLM
from worker_svc.core.kernels.linear.product import Product
from worker_svc.core.layers.placement import Placement
from worker_svc.core.memory import Budget
from worker_svc.factory import load_runner
from worker_svc.model_config import read_model_config
from worker_svc.products import model_products
from worker_svc.runner_options import RunnerOptions


def test_weights_are_counted_without_an_import_that_others_may_be_at() -> None:
    code = (
        "import sys, torch\n"
        "from penstock.launcher.layout import BUNDLED_MODEL\n"
        "from servicekit.checkpoint.model import read_checkpoint\n"
        "from worker_svc.core.layers.placement import Placement\n"
        "from worker_svc.model_config import read_model_config\n"
        "from worker_svc.native import num_weights_bytes\n"
        "config = read_model_config(read_checkpoint(BUNDLED_MODEL))\n"
        "assert num_weights_bytes(config, Placement(torch.device('cpu'), torch.float32)) > config.decoder.vocab_size\n"
        "assert not {'sympy', 'torch._dynamo', 'torch._inductor'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_products_are_those_of_the_layers() -> None:
    config = read_model_config(read_checkpoint(BUNDLED_MODEL))
    placement = Placement(torch.device("meta"), torch.bfloat16)
    products = set(model_products(config, placement))
    CausalLM(config.decoder, placement, max_model_len=16)
    layer = {each.name: each.shape for each in placement.wanted if "layers.0." in each.name and each.shape[1:]}

    def merged(*names: str) -> tuple[int, int]:
        shapes = [size for name in names for key, size in layer.items() if f".{name}." in key]
        assert len(shapes) == len(names)
        return sum(outputs for outputs, _ in shapes), shapes[0][1]

    qkv, gate_up = merged("q_proj", "k_proj", "v_proj"), merged("gate_proj", "up_proj")
    head = next(each.destination.shape for each in placement.wanted if "embed_tokens" in each.name)
    assert products == {
        *(Product("plain", *size) for size in (qkv, gate_up, head)),
        *(Product("normed", *size) for size in (qkv, head)),
        Product("added", *merged("o_proj")),
        Product("added", *merged("down_proj")),
        Product("gated", *gate_up),
    }


def test_there_are_no_more_slots_than_a_step_has_tokens() -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 5, "max_model_len": 32}
    loaded = load_runner(RunnerOptions(str(BUNDLED_MODEL), device="cpu", num_blocks=200, **sizes), time.monotonic_ns)
    assert loaded.runner.limits.max_num_seqs == 5
    loaded.runner.close()


def test_the_log_says_what_computes_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = RunnerOptions(str(BUNDLED_MODEL), device="cpu", num_blocks=200, max_num_seqs=1)
    load_runner(options, time.monotonic_ns).close()
    [chosen] = [record.__dict__ for record in caplog.records if record.message == "attention chosen"]
    assert (chosen["attention"], chosen["reason"]) == ("torch", "the device is cpu")


def test_the_attention_of_prompts_that_is_asked_for_is_the_one_that_is_chosen() -> None:
    with pytest.raises(PenstockError, match="is flash_attn, but torch computes"):
        LLM(str(BUNDLED_MODEL), dtype="float32", prefill_attention="flash_attn")


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "measure_budget", lambda device, share: Budget(1 << 20, share))
    monkeypatch.setattr(native, "load_weights", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(
        PenstockError, match=r"weights need .* more than there is: gpu_memory_utilization 0\.9 of 1\.0 MiB"
    ):
        load_runner(RunnerOptions(str(BUNDLED_MODEL), device="cpu"), lambda: 0)
