"""A run of guidellm with its defaults, in an environment of its own: a gateway's URL, a model's name, its directory."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from counted import usage

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 4, 16
url, name, directory = sys.argv[1:]

with tempfile.TemporaryDirectory() as folder:
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={url.removesuffix('/v1')}"),
        *("--tokenizer", f"kind=huggingface_auto,model={directory}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_OUTPUT_TOKENS}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", "kind=json,path=report.json"),
    ]
    subprocess.run(command, cwd=folder, check=True)
    (run,) = json.loads(Path(folder, "report.json").read_text("utf-8"))["benchmarks"]

assert run["metrics"]["request_totals"] == {
    "successful": NUM_REQUESTS,
    "errored": 0,
    "incomplete": 0,
    "total": NUM_REQUESTS,
}, run["metrics"]["request_totals"]
for request in run["requests"]["successful"]:
    body = json.loads(request["request_args"])["body"]
    assert body["model"] == name
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    counted = usage(url, body)
    assert request["prompt_tokens"] == counted["prompt_tokens"] >= 64
    assert request["output_tokens"] == counted["completion_tokens"] == NUM_OUTPUT_TOKENS
