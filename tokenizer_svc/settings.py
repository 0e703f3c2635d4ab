"""Settings of a tokenizer."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from servicekit.settings import ServiceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings(ServiceSettings):
    """Settings of `tokenizer_svc`."""

    model: str = field(metadata={"help": "checkpoint directory or hub id of the model whose tokenizer is used"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of a hub id"})
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = field(
        default=None,
        metadata={"help": "tokens of prompt and output together; none: as many as the model has positions"},
    )
    generation_config: str = field(
        default="model",
        metadata={
            "help": "whose generation_config.json says what holds where a request does not: the model's own; openai: "
            "nobody's, so that OpenAI's defaults hold; or that of a directory; alike for all tokenizers of a pool"
        },
    )
    trust_request_chat_template: bool = field(
        default=False,
        metadata={
            "help": "chats may bring a chat template of their own, which runs in the sandbox like the model's and may "
            "take as long as it likes: only where callers are trusted; alike for all tokenizers of a pool"
        },
    )
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = field(
        default=2, metadata={"help": "threads for long prompts, beside the one for the short ones"}
    )
    long_prompt_chars: Annotated[int, msgspec.Meta(ge=1)] = field(
        default=16_384, metadata={"help": "prompts of more characters go to a thread, so that they hold up nobody"}
    )
    reclaim_after_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = field(
        default=10.0, metadata={"help": "seconds after which a prompt that another tokenizer took is taken from it"}
    )
