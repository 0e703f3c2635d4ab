"""The files of a checkpoint's tokenizer: its vocabulary, special tokens and chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contract.domain.errors import broken
from servicekit.checkpoint.model import read_json

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer, and what is written for those who write its special tokens."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, Any]  # that templates may write: bos_token, eos_token and the like
    chat_templates: Mapping[str, str]  # sources by name


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`.

    Raises:
        PenstockError: INTERNAL (operator): it is not there or is no tokenizer.
    """
    file = directory / TOKENIZER
    if not file.is_file():
        raise broken(
            f"{directory} has no {TOKENIZER}, the only tokenizer format that Penstock reads; convert the model's own "
            "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot parse
        raise broken(f"{file} is not a tokenizer ({str(error)[:300]}); fetch the checkpoint again") from error
    # Truncation or padding left over from training would change prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """The tokenizer in `directory` and what belongs to it.

    Raises:
        PenstockError: INTERNAL (operator): a file is missing or broken.
    """
    config = {
        **read_json(directory / "special_tokens_map.json"),
        **read_json(directory / "tokenizer_config.json"),
    }
    return TokenizerFiles(read_tokenizer(directory), _special_tokens(config), _chat_templates(directory, config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The usual tokens, and a model's own, such as `image_token`."""
    own = config.get("extra_special_tokens")
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    tokens: dict[str, Any] = {}
    for name, token in {**named, **(own if isinstance(own, dict) else {})}.items():
        if (content := _content(token)) is not None:
            tokens[name] = content
    additional = config.get("additional_special_tokens")
    if isinstance(additional, list):
        tokens["additional_special_tokens"] = [content for token in additional if (content := _content(token))]
    return tokens


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own, else what tokenizer_config.json has, else what a processor's file has."""
    templates: dict[str, str] = {}
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = file.read_text("utf-8")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    for stated in (config.get("chat_template"), read_json(directory / "chat_template.json").get("chat_template")):
        templates = templates or _stated_templates(stated)
    return templates


def _stated_templates(stated: Any) -> dict[str, str]:
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}
    return dict(stated) if isinstance(stated, dict) else {}
