"""What simulated workers answer agents that compare the weather of two cities."""

import json
from pathlib import Path

from byte_tokenizer import write_byte_model
from served import CALM_LEASES, SIMULATED, TWO_GATEWAYS, Served

THOUGHT = "now here, now there, " * 20
CALL = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'
# The first that fits what is asked: a call, after its result another one, and then an answer.
SCRIPT = [
    {"match": "warm in Rome", "answer": "Oslo is cold, Rome is warm."},
    {"match": "cold in Oslo", "answer": CALL.replace("Oslo", "Rome")},
    {"match": "compare", "answer": f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{CALL}"},
    {"match": "greet", "answer": "Hello, you."},
]


def serve(checkpoint: Path, directory: Path) -> Served:
    """Two gateways before workers that follow the script."""
    write_byte_model(checkpoint, vocab_size=300, max_model_len=8192, calls=True)
    script = checkpoint / "script"
    script.write_text("\n".join(map(json.dumps, SCRIPT)))
    flags = (f"--model={checkpoint}", "--served-model-name=simulated", *TWO_GATEWAYS, "--step-ms=2", *SIMULATED)
    flags += (CALM_LEASES,)
    return Served(directory, *flags, f"--script={script}")
