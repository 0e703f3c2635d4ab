"""The page at / in headless Chromium, of a gateway that asks for keys."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import write_byte_model
from served import LONG_LEASES, SIMULATED, Served, wait_until
from test_foreign_clients import call

from contract.domain.api_keys import CONTROL_TOKEN_HEADER, hash_api_key

KEY = "psk_of_alice_for_the_page"
ANSWER = f"<think>\n{'now here, now there, ' * 40}\n</think>\n\nSo be it.\nAnd so it was."
ENDLESS = f"<think>\n{'now here, now there, ' * 1500}"  # four minutes of it, and more on a slower machine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    checkpoint = tmp_path_factory.mktemp("thinking-model")
    write_byte_model(checkpoint, vocab_size=300, max_model_len=32_000, calls=True)
    script = checkpoint / "script"
    lines = ({"match": "on and on", "answer": ENDLESS}, {"match": "to and fro", "answer": ANSWER})
    script.write_text("\n".join(map(json.dumps, lines)))
    keys = checkpoint / "keys"
    keys.write_text(json.dumps({"tenant": "alice", "sha256": hash_api_key(KEY).hex()}))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--step-ms=8", LONG_LEASES, *SIMULATED)
    flags += (f"--script={script}", f"--api-keys-file={keys}")
    with Served(tmp_path_factory.mktemp("page"), *flags) as served:
        yield served.wait_ready()


def control_token(served: Served) -> str:
    found = re.search(r"--control-token-file (\S+)", served.out)
    assert found, served.out
    return Path(found[1]).read_text().strip()


def test_a_chat_streams_its_way_is_drawn_and_the_map_follows_the_blocks(served: Served, tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here")
    call("playwright", "page_calls.py", chromium, served.http_url, KEY, control_token(served), str(tmp_path))
    assert {path.name for path in (tmp_path / "dark").iterdir()} == {"going.png", "ended.png"}


def test_the_page_is_open_and_the_picture_of_the_pool_is_the_operators(served: Served) -> None:
    assert httpx.get(served.http_url, timeout=300).status_code == 200
    url = f"{served.http_url}/v1/pipeline"
    assert httpx.get(url, headers={"authorization": f"Bearer {KEY}"}, timeout=300).status_code == 401
    told: list[dict[str, Any]] = []

    def is_told() -> bool:
        told[:] = httpx.get(url, headers={CONTROL_TOKEN_HEADER: control_token(served)}, timeout=300).json()["blocks"]
        return bool(told)

    wait_until(is_told, "a scheduler tells its blocks")  # once it renews its lease
    assert told[0]["num_blocks"] == 2048


def test_a_gateway_may_have_no_page(checkpoint: Path, tmp_path: Path) -> None:
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", "--no-page", *SIMULATED)
    with Served(tmp_path, *flags) as served:
        served.wait_ready()
        for path in ("/", "/page/page.js"):
            assert httpx.get(served.http_url + path, timeout=300).status_code == 404
        assert httpx.get(f"{served.http_url}/v1/pipeline", timeout=300).status_code == 200
