"""The pipeline under test: `penstock serve` as a process of its own, and who its children are at the moment."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hiredis
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.rig.chaos.kept_server import KeptServer
from bench.rig.chaos.proxy import Proxy
from servicekit.bus.commands import pack

ROOT = Path(__file__).parents[3]
SERVER = "server"
MODEL = "chaos"  # what clients call it
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
NUM_WORDS = 1000
EOS = NUM_WORDS
_EOS = "<eos>"
# Beside words and the end: characters, of which chats and calls are made, and the marks of calls.
_CHARACTERS = "Ċ" + "".join(map(chr, range(0x21, 0x7F))) + "Ġ"
_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Of messages on channels, the first two of which end an output.
_CHANNEL_MARKS = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
_FIRST_CHANNEL_MARK = NUM_WORDS + 1 + len(_CHARACTERS) + len(_MARKS)
VOCAB_SIZE = _FIRST_CHANNEL_MARK + len(_CHANNEL_MARKS)
EOS_IDS = (EOS, _FIRST_CHANNEL_MARK, _FIRST_CHANNEL_MARK + 1)
# By the family whose formats of thoughts and calls a model has, which are found in what it writes.
TEMPLATES = {
    "hermes": (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}{{ tools[0].function.name }}"
        "<tool_call>arguments</tool_call>{% endif %}{{ '<think>' if thinking else '' }}"
        "{{ '' if messages else '</think>' }}"
    ),
    "harmony": (
        "{% if tools %}<|start|>developer<|message|>{{ tools[0].function.name }}<|end|>{% endif %}"
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
        "<|start|>assistant{{ '' if messages else '<|channel|>commentary<|message|>{}<|call|>' }}"
    ),
}
EOS_EVERY = 300
MAX_MODEL_LEN = 8192
READY_TIMEOUT_S = 300.0
_LIVES = re.compile(r"^(\S+) started \(pid|^ *(\S+) \|.*\[info\] ready$", re.MULTILINE)
STOP_TIMEOUT_S = 60.0


def write_model(directory: Path, chats: str) -> None:
    """A checkpoint for the simulated runner; `chats` names one of `TEMPLATES`."""
    directory.mkdir()
    make_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS,
    }
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    told = {"chat_template": TEMPLATES[chats], "eos_token": _EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(told), "utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}), "utf-8")


def make_tokenizer() -> Tokenizer:
    """Tokens are words of their own, the end of sequence, characters and marks."""
    words = {f"Ġw{token_id:03}": token_id for token_id in range(NUM_WORDS)}
    characters = {character: EOS + 1 + index for index, character in enumerate(_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**words, _EOS: EOS, **characters}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_EOS, special=True)])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in _MARKS])
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in _CHANNEL_MARKS])
    return tokenizer


@dataclass(frozen=True)
class Gateway:
    """The addresses of one gateway."""

    name: str
    grpc_address: str
    http_url: str


class ServedPipeline:
    """A running pipeline with `replicas` of each service; ends with the `with`.

    Its workers are simulated unless a model is given; a flag counts for more than what stands before it. Behind a proxy
    its server is the bench's: services reach it through that alone, and it is kept alive as the launcher would.
    """

    def __init__(
        self,
        directory: Path,
        replicas: int,
        flags: Sequence[str],
        model: Path | None = None,
        *,
        has_proxy: bool = False,
        code: Path | None = None,
        chats: str = "hermes",
    ) -> None:
        """Starts it.

        Args:
            directory: for all that it writes.
            replicas: processes of each service.
            flags: of `penstock serve`.
            model: a checkpoint; None: one is written, for simulated workers.
            has_proxy: whether its server is reached through a proxy.
            code: the folder of packages that it and whatever it starts again are of, where that is not this checkout.
            chats: one of `TEMPLATES`, that of the checkpoint that is written.
        """
        self._directory = directory
        directory.mkdir(parents=True)
        self._out, self._err = directory / "out", directory / "err"
        self._kept = KeptServer(self.data_dir, self._say) if has_proxy else None
        where = f"--redis-url={self._kept.proxy.url}" if self._kept else f"--data-dir={self.data_dir}"
        # A file of pools says by itself what models are called.
        has_pools = any(flag.startswith("--pools=") for flag in flags)
        runner: tuple[str, ...] = () if has_pools else (f"--served-model-name={MODEL}",)
        if model is None:
            model = directory / "model"
            write_model(model, chats)
            runner += ("--runner=simulated", f"--eos-every={EOS_EVERY}", f"--max-model-len={MAX_MODEL_LEN}")
        self.serve_flags = (f"--model={model}", *runner, *(f"--{kind}s={replicas}" for kind in KINDS), *flags)
        command = [sys.executable, "-m", "penstock.cli", "serve", "--port=0", "--grpc-port=0", where, *self.serve_flags]
        # Others write to the log as well, each a line at its end.
        # Python looks for packages in its working directory first, and at each start in what the path leads to.
        where_from, environ = (directory, os.environ | {"PYTHONPATH": str(code)}) if code else (ROOT, None)
        with self._out.open("w") as out, self._err.open("a") as err:
            self.process = subprocess.Popen(
                command, cwd=where_from, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def __enter__(self) -> "ServedPipeline":
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while "penstock status" not in self._out.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise SystemExit(f"the pipeline does not start:\n{self.log[-4000:]}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends it in order; the launcher takes its children along however it ends."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._kept:
            self._kept.close()
            self._kept = None

    @property
    def proxy(self) -> Proxy:
        """Before its server, if it was asked for."""
        assert self._kept
        return self._kept.proxy

    @property
    def redis_url(self) -> str:
        """As its services know the server."""
        return self._kept.proxy.url if self._kept else f"unix://{self._found_socket()}"

    @property
    def log_path(self) -> Path:
        """The file to which launcher and services append what they write."""
        return self._err

    @property
    def data_dir(self) -> Path:
        """Of its server."""
        return self._directory / "data"

    @property
    def log(self) -> str:
        """The output of launcher and services."""
        return self._err.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """The process that each child was last, the server too, by name."""
        found = re.findall(r"^(\S+) started \(pid (\d+)\)", self.log, re.MULTILINE)
        return {name: int(pid) for name, pid in found}

    def ready(self) -> set[str]:
        """The children that have been ready since they were last started."""
        found: set[str] = set()
        for started, is_ready in _LIVES.findall(self.log):
            found.discard(started)
            found.add(is_ready)
        return found - {""}

    def gateways(self) -> list[Gateway]:
        """In the order of their names."""
        out = self._out.read_text()
        http_urls = re.findall(r"OpenAI HTTP +(\S+)/v1", out)
        addresses = re.findall(r"gRPC +(\S+)", out)
        return [
            Gateway(f"gateway-{index}", address, url)
            for index, (address, url) in enumerate(zip(addresses, http_urls, strict=True))
        ]

    def server(self) -> "RawServer":
        """A connection that sees the keys as they are."""
        return RawServer(self._found_socket())

    def survivors(self) -> list[int]:
        """Processes that were this pipeline's and still run: none, once it has ended."""
        mark = str(self._directory).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                # The server's address, a password in it, is in the environment.
                if mark in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:  # ended meanwhile
                continue
        return found

    def _say(self, line: str) -> None:
        with self._err.open("a") as err:
            err.write(f"{line}\n")

    def _found_socket(self) -> str:
        match = re.search(r"^server started .* at unix://(\S+)", self.log, re.MULTILINE)
        assert match
        return match[1]


class RawServer:
    """Plain commands to the server, for reading its keys."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(10.0)
        self._socket.connect(path)
        self._reader = hiredis.Reader()

    def command(self, *words: str | bytes) -> object:
        """The reply to one command."""
        self._socket.sendall(pack(words))
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()
