"""From a checkpoint to the vocabulary that prompts go through."""

from pathlib import Path
from typing import Any

from contract.domain.errors import broken
from servicekit.checkpoint.facts import model_facts
from servicekit.checkpoint.grammars import GrammarTokens
from servicekit.checkpoint.location import find_checkpoint
from servicekit.checkpoint.model import GENERATION_CONFIG, Checkpoint, read_checkpoint, read_json
from servicekit.checkpoint.pooling import pooling_facts
from servicekit.checkpoint.tokenizer import TOKENIZER, read_tokenizer_files
from tokenizer_svc.core.chat import ChatTemplates
from tokenizer_svc.core.generation_config import generation_defaults, not_done
from tokenizer_svc.core.longest_token import max_token_bytes
from tokenizer_svc.core.output_formats import chat_facts
from tokenizer_svc.core.vocabulary import Vocabulary

_MODEL = "model"  # whose own file counts
_OPENAI = "openai"  # no file counts
_ALIASES = {"auto": _MODEL, "vllm": _OPENAI}  # vLLM's names of the same


def load_vocabulary(
    model: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    max_model_len: int | None = None,
    generation_config: str = _MODEL,
    trust_request_chat_template: bool = False,
) -> Vocabulary:
    """Reads the vocabulary of a local directory or hub id.

    Args:
        model: a directory in the Hugging Face layout, or a hub id.
        tokenizer: directory or hub id of the tokenizer and its chat templates; None: the model's.
        revision: branch, tag or commit of a hub id.
        max_model_len: context length in tokens; None: what config.json says.
        generation_config: whose generation_config.json counts: `model`, `openai` (nobody's), or that of a directory.
        trust_request_chat_template: chats may bring a template of their own.

    Raises:
        PenstockError: INVALID_ARGUMENT: the model does not reach `max_model_len`; INTERNAL (operator): a file is
            missing or broken.
    """
    checkpoint = read_checkpoint(find_checkpoint(model, revision))
    directory = find_checkpoint(tokenizer, revision) if tokenizer else checkpoint.directory
    text = read_tokenizer_files(directory)
    chosen = _chosen_generation_config(checkpoint, generation_config)
    facts = model_facts(checkpoint, text, max_model_len=max_model_len, generation_config=chosen)
    chat = ChatTemplates(text.chat_templates, text.special_tokens, trusts_requests=trust_request_chat_template)
    return Vocabulary(
        tokenizer=text.tokenizer,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        context_length=facts.context_length,
        chat=chat,
        max_token_bytes=max_token_bytes(read_json(directory / TOKENIZER)),
        defaults=generation_defaults(chosen, facts.vocab_size),
        defaults_not_done=tuple(not_done(chosen)),
        grammar_tokens=GrammarTokens(lambda: text.tokenizer, facts.vocab_size),
        facts=chat_facts(chat, text.tokenizer),
        pooling=pooling_facts(checkpoint),
    )


def _chosen_generation_config(checkpoint: Checkpoint, choice: str) -> dict[str, Any]:
    """Of the file that counts; empty: none does."""
    choice = _ALIASES.get(choice, choice)
    if choice == _OPENAI:
        return {}
    if choice == _MODEL:
        return checkpoint.generation_config
    file = Path(choice).expanduser() / GENERATION_CONFIG
    if not file.is_file():
        raise broken(
            f"--generation-config is {_MODEL}, {_OPENAI} or a directory with a {GENERATION_CONFIG}, and {file} is no "
            "file"
        )
    return read_json(file)
