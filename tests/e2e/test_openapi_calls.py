"""Schemathesis calls everything that the description of the API says, rightly and wrongly: every answer is in it."""

import os
import subprocess
from pathlib import Path

import httpx
from byte_tokenizer import write_byte_model
from environments import CLIENTS, python_with
from served import LONG_LEASES, SIMULATED, VOCAB_SIZE, Served
from test_foreign_clients import ENVIRON

LIMIT_S = 1700.0


def test_every_answer_is_one_that_the_description_has(tmp_path: Path) -> None:
    python = python_with("schemathesis")
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    # A short context, as most calls leave it to the context when they end.
    write_byte_model(checkpoint, vocab_size=VOCAB_SIZE, max_model_len=32, chats=True)
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--step-ms=0", LONG_LEASES, *SIMULATED)
    with Served(tmp_path, *flags) as served:
        url = served.wait_ready().http_url
        known = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=300)
        called = subprocess.run(
            [
                *(str(python.with_name("st")), "--config-file", str(CLIENTS / "schemathesis.toml")),
                *("run", f"{url}/openapi.json", "--no-color"),
            ],
            cwd=tmp_path,
            env=os.environ | ENVIRON | {"REQUEST_ID": known.headers["x-penstock-request-id"]},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert called.returncode == 0, called.stdout[-8000:] + called.stderr[-2000:]
        assert httpx.get(f"{url}/health", timeout=300).status_code == 200
        assert served.err.count("gateway-0 started") == 1, served.err
        assert "Traceback" not in served.err, served.err
