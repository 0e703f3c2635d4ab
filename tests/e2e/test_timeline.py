"""The timeline of a request over HTTP, and as `penstock trace` draws it."""

import subprocess
import sys

import httpx
from served import Served, wait_until

NAMES = ["accepted", "tokenizing", "tokenized", "claimed", "started", "last_token", "result", "delivered"]


def moments(served: Served, request_id: str) -> list[dict[str, object]]:
    answer = httpx.get(f"{served.http_url}/v1/requests/{request_id}/timeline", timeout=300)
    assert answer.status_code == 200, answer.text
    (request,) = answer.json()["requests"]
    return list(request["moments"])


def test_a_request_that_was_answered_has_every_moment_in_order(simulated: Served) -> None:
    body = {"prompt": "tell", "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{simulated.http_url}/v1/completions", json=body, timeout=300)
    request_id = reply.headers["x-penstock-request-id"]
    timing = dict(each.split(";dur=") for each in reply.headers["server-timing"].split(", "))
    assert 0 < float(timing["first-token"]) <= float(timing["total"])
    wait_until(
        lambda: [each["name"] for each in moments(simulated, request_id)] == NAMES, "the client's last byte is told"
    )
    told = moments(simulated, request_id)
    times = {str(each["name"]): float(str(each["ms"])) for each in told}
    assert times["accepted"] == 0 <= times["tokenizing"] <= times["tokenized"]
    assert times["started"] <= times["last_token"] <= times["result"]
    (started,) = (each for each in told if each["name"] == "started")
    assert (started["reason"], started["sample"], started["num_tokens"]) == ("first", 0, 0)
    command = [sys.executable, "-m", "penstock.cli", "trace", reply.json()["id"], f"--base-url={simulated.http_url}"]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert [line.split()[0] for line in drawn.splitlines()[1:]] == [
        "submit", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver",
    ]  # fmt: skip


def test_an_unknown_request_has_none(simulated: Served) -> None:
    unknown = "0" * 32
    assert httpx.get(f"{simulated.http_url}/v1/requests/{unknown}/timeline", timeout=300).status_code == 404
    command = [sys.executable, "-m", "penstock.cli", "trace", unknown, f"--base-url={simulated.http_url}"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 1
    assert f"there is no request {unknown}" in refused.stderr
