"""A model's text side: the tokenizer, its special tokens, EOS, limits and chat templates."""

from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer
from tokenizers import Tokenizer

from contract.domain.chat_facts import UNKNOWN_CHAT, ChatFacts
from contract.domain.generation_defaults import OPENAI_DEFAULTS, GenerationDefaults
from contract.domain.pooling import PLAIN_POOLING, PoolingFacts
from tokenizer_svc.core.chat import ChatTemplates


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's text side, as its files say it."""

    tokenizer: Tokenizer
    vocab_size: int  # ids are below it: the model's own (config.json) where known
    eos_token_ids: tuple[int, ...]  # ascending
    context_length: int  # tokens, prompt and output together
    chat: ChatTemplates
    max_token_bytes: int | None = None  # bytes of text that one token stands for at most, where that is known
    defaults: GenerationDefaults = OPENAI_DEFAULTS  # what holds where a request does not say otherwise
    grammar_tokens: Callable[[], LLTokenizer] | None = None  # what grammars of outputs are made of; None: none are
    facts: ChatFacts = UNKNOWN_CHAT  # the form of its outputs
    pooling: PoolingFacts = PLAIN_POOLING  # how prompts become vectors where a request does not say otherwise
    defaults_not_done: tuple[str, ...] = ()  # what the model's makers wish beside them, and nothing here does
