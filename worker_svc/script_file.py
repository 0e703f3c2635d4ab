"""The file of a simulated worker's script: a JSON line with `match` and `answer` for each answer."""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from contract.domain.errors import broken
from worker_svc.core.script import Line, Script

_FIELDS = {"match", "answer"}


def read_script(path: Path, tokenizer: Tokenizer, eos_token_id: int) -> Script:
    """The script in a file, its answers as tokens, each with the end token after it.

    Raises:
        PenstockError: INTERNAL (operator): the file cannot be read, or a line is none; the message names it.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise broken(f"--script {path} cannot be read: {error}") from error
    told = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    lines = [_line(f"{path}:{number}", line, tokenizer, eos_token_id) for number, line in told]
    return Script(lines, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def _line(where: str, text: str, tokenizer: Tokenizer, eos_token_id: int) -> Line:
    try:
        said: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise broken(f"{where} is no JSON: {error}") from error
    if not isinstance(said, dict) or set(said) != _FIELDS or not all(isinstance(each, str) for each in said.values()):
        raise broken(f'{where} must be {{"match": text, "answer": text}}, got {text:.80}')
    ids = tokenizer.encode(said["answer"], add_special_tokens=False).ids
    return Line(said["match"], (*ids, eos_token_id))
