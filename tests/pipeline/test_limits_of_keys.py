"""A key's limits through all services: what a request used is known when it has ended."""

import json
import time
from pathlib import Path

import httpx
from in_memory import Pipeline

from contract.domain.api_keys import hash_api_key

WORKER = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 8}
PROMPT = [1, 2, 3]


def test_tokens_that_were_granted_and_not_used_are_given_back(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    entries = [{"tenant": "a", "sha256": hash_api_key("free").hex()}]
    entries.append({"tenant": "a", "sha256": hash_api_key("limited").hex(), "tpm": 20})
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with Pipeline(checkpoint, worker=WORKER, gateway={"api_keys_file": file}) as pipeline:

        def ask(key: str, **fields: object) -> httpx.Response:
            url = f"http://127.0.0.1:{pipeline.gateway.http_port}/v1/completions"
            body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
            return httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=300)

        told = ask("free", logprobs=0, return_tokens_as_token_ids=True).raise_for_status().json()
        first = int(told["choices"][0]["logprobs"]["tokens"][0].removeprefix("token_id:"))
        # Each is granted its prompt's three and twelve more, and uses four.
        assert ask("limited", stop_token_ids=[first]).json()["usage"]["total_tokens"] == 4
        deadline_s = time.monotonic() + 300
        while (reply := ask("limited", stop_token_ids=[first])).status_code == 429:  # until its end is kept
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert reply.json()["usage"]["total_tokens"] == 4
        refused = ask("limited", stop_token_ids=[first])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
