"""The pods' own commands: a pipeline of them comes up by its own probes, answers, and is upgraded unseen; whoever
connects to whom is what the network policies let through."""

import itertools
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import trustme
from kube import ROOT, render
from local_pods import LocalRelease, needs_strace, wait_until
from rollouts import VALUES, read_record
from served import write_checkpoint
from test_network_policies import arrows
from valkeys import needs_client

NUM_TOKENS = 200
NUM_PROMPTS = 4
MAX_CLIENTS = 32  # at once: streams pause while their worker is replaced, and more come meanwhile
ARRIVAL_S = 0.4
# Arrows that policies allow and that nothing here draws, each with its reason.
UNUSED: dict[tuple[str, str, int], str] = {
    ("gateway", "tokenizer", 50051): "only calls that need a vocabulary alone draw it, and nobody makes one here",
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator["Installed"]:
    needs_strace()
    needs_client()
    folder = tmp_path_factory.mktemp("release")
    models = folder / "models"
    (models / "Qwen3-8B").mkdir(parents=True)
    write_checkpoint(models / "Qwen3-8B")
    certificate = authority.issue_cert("127.0.0.1")
    command = [sys.executable, "-m", "penstock.cli", "keys", "new", "--tenant", "research"]
    key, line = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    secrets = {
        "penstock-control-token": {"token": "control-token-of-tests-" * 2},
        "penstock-metrics-token": {"token": "metrics-token-of-tests-" * 2},
        "penstock-tls": {
            "tls.crt": "".join(each.bytes().decode() for each in certificate.cert_chain_pems),
            "tls.key": certificate.private_key_pem.bytes().decode(),
        },
        "penstock-api-keys": {"keys.jsonl": f"{line}\n"},
    }
    with LocalRelease(folder, render(*VALUES), secrets=secrets, claims={"models": models}) as release:
        release.install()
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        yield Installed(release, trust, key)


@dataclass(frozen=True)
class Installed:
    """A release that runs, and how it is called."""

    pods: LocalRelease
    trust: ssl.SSLContext
    key: str

    def complete(self, prompt: list[int]) -> str:
        """The text of a stream through one of the gateways that are there, as a Service sends its clients to them."""
        body = {"model": "qwen3-8b", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.key}"}
        with self.pods.chosen("gateway", prompt[0]) as (gateway, has_come), httpx.Client(verify=self.trust) as client:
            url = f"https://127.0.0.1:{gateway.port('http')}/v1/completions"

            def trace(event: str, _: object) -> None:
                if event == "http11.send_request_body.complete":
                    has_come()

            request = client.build_request(
                "POST", url, json=body, headers=headers, timeout=300, extensions={"trace": trace}
            )
            reply = client.send(request, stream=True)
            events = b"".join(reply.iter_bytes()).decode().split("\n\n")
            assert reply.status_code == 200, events
        data = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
        assert data[-1] == "[DONE]", data[-1]
        return "".join(json.loads(each)["choices"][0]["text"] for each in data[:-1])


class Clients:
    """They come one after the other, whatever becomes of those before; every stream must be whole and as it was."""

    def __init__(self, release: Installed, answers: dict[int, str]) -> None:
        self._release, self._answers = release, answers
        self._stopping = threading.Event()
        self.num_begun = self.num_ended = 0
        self.wrongs: list[str] = []
        self._door = threading.Thread(target=self._let_in)

    def __enter__(self) -> "Clients":
        self._door.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._door.join()

    def wait_for_more(self) -> None:
        """Until as many have ended as have come, and some more."""
        wanted = self.num_begun + 2 * NUM_PROMPTS
        wait_until(lambda: self.num_ended >= wanted or bool(self.wrongs), "streams end")

    def _let_in(self) -> None:
        with ThreadPoolExecutor(MAX_CLIENTS) as threads:
            for first in itertools.cycle(self._answers):
                if self._stopping.wait(ARRIVAL_S):
                    return
                if self.num_begun - self.num_ended >= MAX_CLIENTS:
                    continue  # a machine that has others to serve: as many as wait are enough
                self.num_begun += 1
                threads.submit(self._ask, first)

    def _ask(self, first: int) -> None:
        try:
            if self._release.complete([first, 7, 9]) != self._answers[first]:
                self.wrongs.append(f"{first}: another text")
        except (AssertionError, httpx.HTTPError) as error:
            self.wrongs.append(f"{first}: {error!r}")
        self.num_ended += 1


@pytest.fixture(scope="module")
def answers(release: Installed) -> dict[int, str]:
    """The answers to the clients' prompts."""
    return {first: release.complete([first, 7, 9]) for first in range(1, NUM_PROMPTS + 1)}


def test_the_pods_commands_make_a_pipeline_that_answers(release: Installed, answers: dict[int, str]) -> None:
    assert all(len(each) >= NUM_TOKENS / 4 for each in answers.values())
    assert len(set(answers.values())) == NUM_PROMPTS
    for pod in release.pods.pods:
        wait_until(pod.is_alive, f"{pod.name} is alive")
        wait_until(pod.is_ready, f"{pod.name} is ready")


def test_no_client_sees_an_upgrade_in_the_order_of_kubernetes_controllers(
    release: Installed, answers: dict[int, str]
) -> None:
    before = release.pods.pods
    with Clients(release, answers) as clients:
        clients.wait_for_more()
        release.pods.upgrade(read_record())
        clients.wait_for_more()
    assert not clients.wrongs
    assert len(release.pods.pods) == len(before)
    assert not {*release.pods.pods} & {*before}


def test_pods_connect_where_the_network_policies_let_them_and_use_what_these_allow(release: Installed) -> None:
    allowed = arrows(render(*VALUES))
    # Sentinels find each other, and Valkeys them, a few seconds after they are ready.
    wait_until(lambda: allowed - release.pods.connections() <= UNUSED.keys(), "every allowed arrow is drawn")
    drawn = release.pods.connections()
    own = {
        each for each in drawn if each[0] == each[1] and each[0] == "valkey"
    }  # its supervisor asks the server itself
    assert drawn - own <= allowed
    assert allowed - drawn == UNUSED.keys()
