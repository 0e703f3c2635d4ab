"""What a checkpoint's files say about text: the tokenizer, its special tokens, EOS, limits and chat templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from tokenizer_svc.core.chat import ChatTemplates
from tokenizer_svc.core.checkpoint import broken, find_checkpoint, read_json
from tokenizer_svc.core.generation_config import (
    GENERATION_CONFIG,
    MODEL,
    generation_defaults,
    not_done,
    read_generation_config,
)
from tokenizer_svc.core.longest_token import max_token_bytes

_STRETCHING_ROPES = ("linear", "dynamic", "yarn")  # their factor lengthens max_position_embeddings


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's text side, as read from its files."""

    tokenizer: Tokenizer
    vocab_size: int  # ids are below it: the model's own (config.json) where known
    eos_token_ids: tuple[int, ...]  # ascending
    context_length: int  # tokens, prompt and output together
    chat: ChatTemplates
    max_token_bytes: int | None = None  # bytes of text that one token stands for at most, where that is known
    defaults: GenerationDefaults = OPENAI_DEFAULTS  # what holds where a request does not say otherwise
    defaults_not_done: tuple[str, ...] = ()  # what the model's makers wish beside them, and nothing here does


def load_vocabulary(
    model: str, *, revision: str | None = None, max_model_len: int | None = None, generation_config: str = MODEL
) -> Vocabulary:
    """Reads the vocabulary of a local directory or hub id.

    Args:
        model: a directory in the Hugging Face layout, or a hub id.
        revision: branch, tag or commit of a hub id.
        max_model_len: context length in tokens; None: what config.json says.
        generation_config: whose generation_config.json counts: `model`, `openai` (nobody's), or that of a directory.

    Raises:
        PenstockError: INTERNAL (operator): a file is missing, broken or contradicts `max_model_len`.
    """
    path = find_checkpoint(model, revision)
    config = read_json(path / "config.json")
    config = {**config, **config.get("text_config", {})}
    tokenizer_config = {
        **read_json(path / "special_tokens_map.json"),
        **read_json(path / "tokenizer_config.json"),
    }
    tokenizer = _read_tokenizer(path)
    special_tokens = _special_tokens(tokenizer_config)
    vocab_size = int(config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True))
    generation = read_generation_config(path, generation_config)
    return Vocabulary(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(
            {**config, **read_json(path / GENERATION_CONFIG), **generation}, tokenizer, special_tokens, vocab_size
        ),
        context_length=_context_length(path, config, max_model_len),
        chat=ChatTemplates(_chat_templates(path, tokenizer_config), special_tokens),
        max_token_bytes=max_token_bytes(read_json(path / "tokenizer.json")),
        defaults=generation_defaults(generation, vocab_size),
        defaults_not_done=tuple(not_done(generation)),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise broken(
            f"{path} has no tokenizer.json, the only tokenizer format that Penstock reads; convert the model's own "
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


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, Any]:
    """The tokens that templates may write: the usual tokens, and a model's own, such as `image_token`."""
    own = tokenizer_config.get("extra_special_tokens")
    named = {name: token for name, token in tokenizer_config.items() if name.endswith("_token")}
    tokens: dict[str, Any] = {}
    for name, token in {**named, **(own if isinstance(own, dict) else {})}.items():
        if (content := _content(token)) is not None:
            tokens[name] = content
    additional = tokenizer_config.get("additional_special_tokens")
    if isinstance(additional, list):
        tokens["additional_special_tokens"] = [content for token in additional if (content := _content(token))]
    return tokens


def _eos_token_ids(
    config: dict[str, Any], tokenizer: Tokenizer, special_tokens: dict[str, Any], vocab_size: int
) -> tuple[int, ...]:
    stated = config.get("eos_token_id")
    ids = set(stated) if isinstance(stated, list) else {stated}
    if "eos_token" in special_tokens:
        ids.add(tokenizer.token_to_id(special_tokens["eos_token"]))
    # An id that the model has no logit for cannot end anything.
    return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))


def _context_length(path: Path, config: dict[str, Any], max_model_len: int | None) -> int:
    stated = config.get("max_position_embeddings")
    if not isinstance(stated, int):
        if max_model_len is None and not (path / "config.json").exists():
            raise broken(
                f"{path} has no config.json, which says how long the model's context is: give the directory that holds "
                "it, fetch the checkpoint again, or set max_model_len"
            )
        if max_model_len is None:
            raise broken(f"{path}/config.json does not say max_position_embeddings; set max_model_len")
        return max_model_len
    if max_model_len is None:
        return stated
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    limit = int(stated * float(rope.get("factor", 1.0))) if kind in _STRETCHING_ROPES else stated
    if max_model_len > limit:
        raise broken(f"max_model_len {max_model_len} exceeds the {limit} positions of the model in {path}")
    return max_model_len


def _chat_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Sources by name: files of their own, else what tokenizer_config.json has, else what a processor's file has."""
    templates: dict[str, str] = {}
    if (file := path / "chat_template.jinja").is_file():
        templates["default"] = file.read_text("utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text("utf-8")
    for stated in (tokenizer_config.get("chat_template"), read_json(path / "chat_template.json").get("chat_template")):
        templates = templates or _stated_templates(stated)
    return templates


def _stated_templates(stated: Any) -> dict[str, str]:
    if isinstance(stated, str):
        return {"default": stated}
    if isinstance(stated, list):
        return {entry["name"]: entry["template"] for entry in stated}
    return dict(stated) if isinstance(stated, dict) else {}
