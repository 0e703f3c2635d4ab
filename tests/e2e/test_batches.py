"""`penstock run-batch` against a pipeline: every line gets its answer, also where a gateway dies and a run goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from served import Served

NUM_LINES = 24


def run(served: Served, lines: list[dict[str, Any]], folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    files = [f"--input-file={folder / 'in.jsonl'}", f"--output-file={folder / 'out.jsonl'}"]
    command = [sys.executable, "-m", "penstock.cli", "run-batch", f"--base-url={served.http_url}", *files, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def completion(number: int) -> dict[str, Any]:
    body = {"prompt": [number + 1, 5], "max_tokens": 6, "temperature": 0}
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}


def test_each_line_has_an_answer_and_a_wrong_one_its_error(simulated: Served, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [completion(number) for number in range(NUM_LINES)]
    lines.append({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    lines.append({"custom_id": "wrong", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}})
    done = run(simulated, lines, tmp_path, "--concurrency=5")
    assert done.returncode == 1, done.stderr
    assert "1 of 26 requests failed" in done.stderr
    found = results(tmp_path)
    assert set(found) == {line["custom_id"] for line in lines}
    for number in range(NUM_LINES):
        response = found[f"c{number}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 6
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["wrong"]["response"]["body"]["error"]["param"] == "prompt"


def test_a_run_goes_on_where_another_ended(simulated: Served, tmp_path: Path) -> None:
    lines = [completion(number) for number in range(6)]
    assert run(simulated, lines[:3], tmp_path).returncode == 0
    first = (tmp_path / "out.jsonl").read_text("utf-8")
    wrong = completion(3) | {"body": {"prompt": ""}}
    assert run(simulated, [*lines[:3], wrong], tmp_path, "--resume").returncode == 1
    assert results(tmp_path)["c3"]["response"]["status_code"] == 400
    refused = run(simulated, lines, tmp_path)
    assert refused.returncode == 2
    assert "is there already" in refused.stderr
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"custom_id": "c4", "cut o')  # as it is when the machine stops
    assert run(simulated, lines, tmp_path, "--resume").returncode == 0
    assert (tmp_path / "out.jsonl").read_text("utf-8").startswith(first)
    assert set(results(tmp_path)) == {line["custom_id"] for line in lines}
