"""A run of aiperf with its defaults, in an environment of its own: a gateway's URL, a model's name, its directory."""

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
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--ui", "none", "--artifact-dir", folder),
        *("--model", name, "--url", url.removesuffix("/v1"), "--tokenizer", directory, "--streaming"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(NUM_OUTPUT_TOKENS)),
        # The model may end before; how long an answer is must be known here.
        *("--extra-inputs", "ignore_eos:true", "--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
    ]
    subprocess.run(command, cwd=folder, check=True)
    summary = json.loads(Path(folder, "profile_export_aiperf.json").read_text("utf-8"))
    sent = json.loads(Path(folder, "inputs.json").read_text("utf-8"))["data"]
    records = [json.loads(line) for line in Path(folder, "profile_export.jsonl").read_text("utf-8").splitlines()]

assert summary["error_summary"] == []
assert summary["request_count"]["avg"] == len(records) == NUM_REQUESTS
bodies = {each["session_id"]: each["payloads"][0] for each in sent}
for record in records:
    assert record.get("error") is None
    metrics = {key: measured["value"] for key, measured in record["metrics"].items()}
    counted = usage(url, bodies[record["metadata"]["conversation_id"]])
    assert metrics["usage_prompt_tokens"] == counted["prompt_tokens"] > metrics["input_sequence_length"] == 64
    assert metrics["usage_completion_tokens"] == counted["completion_tokens"] == NUM_OUTPUT_TOKENS
    # Counted from the text, in which an end token that did not end it has none.
    assert 0 < metrics["output_sequence_length"] <= NUM_OUTPUT_TOKENS
    assert metrics["time_to_first_token"] > 0
