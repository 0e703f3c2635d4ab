"""Packages that people call an OpenAI server with, each in an environment of its own, as they come."""

import json
import os
import subprocess
from typing import Any

import pytest
import torch
from environments import CLIENTS, python_with
from served import Served
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.launcher.layout import BUNDLED_MODEL

CALLS_TIMEOUT_S = 1200.0
# litellm looks for newer prices of models on the network otherwise.
ENVIRON = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "PYTHONPATH": "",
    "PYTHONDONTWRITEBYTECODE": "",  # nothing is compiled as it is installed, but what is imported, once
}
# lm-eval asks hubs for data that are files. aiperf, told to be offline, looks for directories of tokenizers in a cache;
# its processes wait half a minute for each other, which is short while a machine has others to serve.
_WAITS_OF_AIPERF = ("REGISTRATION", "START", "COMMAND_RESPONSE", "PROFILE_START", "PROFILE_CONFIGURE")
ENVIRON_OF = {
    "lm-eval": {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    "aiperf": {f"AIPERF_SERVICE_{name}_TIMEOUT": "600" for name in _WAITS_OF_AIPERF},
}


@pytest.mark.parametrize(
    ("package", "calls"), [("litellm", "litellm_calls.py"), ("langchain-openai", "langchain_calls.py")]
)
def test_a_package_works_as_it_comes(simulated: Served, package: str, calls: str) -> None:
    call(package, calls, f"{simulated.http_url}/v1", "simulated")


@pytest.mark.parametrize(
    ("package", "calls", "path"),
    [("anthropic", "anthropic_calls.py", ""), ("openai-agents", "agents_calls.py", "/v1")],
)
def test_a_package_for_agents_works_as_it_comes(agents: Served, package: str, calls: str, path: str) -> None:
    call(package, calls, f"{agents.http_urls[1]}{path}", "simulated")


@pytest.mark.parametrize(("package", "calls"), [("guidellm", "guidellm_calls.py"), ("aiperf", "aiperf_calls.py")])
def test_a_benchmark_of_servers_counts_what_the_server_says(bundled: Served, package: str, calls: str) -> None:
    call(package, calls, f"{bundled.http_url}/v1", bundled.model, str(BUNDLED_MODEL))


def test_an_evaluation_scores_and_generates_as_transformers_does(bundled: Served) -> None:
    told = call("lm-eval", "lm_eval_calls.py", f"{bundled.http_url}/v1", bundled.model, str(BUNDLED_MODEL))
    answers = json.loads(told.splitlines()[-1])
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    best: dict[str, list[float]] = {}
    for each in answers["scored"]:
        logprob, is_greedy = _score(model, tokenizer, each["context"], each["continuation"])
        assert each["answer"] == [pytest.approx(logprob, abs=1e-3), is_greedy], each
        best.setdefault(each["context"], []).append(logprob)
    assert len(answers["scored"]) == 10
    assert any(is_greedy for _, is_greedy in (each["answer"] for each in answers["scored"]))
    rights = (0, 0, 1, 0)
    right = [scores.index(max(scores)) == wanted for scores, wanted in zip(best.values(), rights, strict=True)]
    assert answers["accuracy"] == sum(right) / len(right)
    for each in answers["generated"]:
        prompt = tokenizer(each["context"], add_special_tokens=False, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
        assert each["text"] == tokenizer.decode(output, skip_special_tokens=True).partition("\n")[0]


@torch.inference_mode()
def _score(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The logprob of a continuation, and whether each of its tokens is the likeliest; tokenized as lm-eval does."""
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    num_before = len(tokenizer.encode(context, add_special_tokens=False))
    logprobs = model(torch.tensor([whole])).logits[0, num_before - 1 : -1].float().log_softmax(-1)
    wanted = torch.tensor(whole[num_before:])
    own = logprobs.gather(1, wanted[:, None])
    return float(own.sum()), bool((logprobs.argmax(-1) == wanted).all())


def call(package: str, calls: str, *words: str) -> str:
    """Runs what is in a file of calls in the environment of a package, and returns what that printed."""
    ended = subprocess.run(
        [str(python_with(package)), str(CLIENTS / calls), *words],
        env=os.environ | ENVIRON | ENVIRON_OF.get(package, {}),
        capture_output=True,
        text=True,
        timeout=CALLS_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout
