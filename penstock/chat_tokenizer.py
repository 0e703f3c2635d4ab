"""The tokenizer that `LLM.get_tokenizer` gives: the model's, with its chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from penstock.prompts import Conversation, parse_conversation
from tokenizer_svc.core.tokenize import PromptTokenizer


class ChatTokenizer:
    """A `tokenizers.Tokenizer`, whose methods it has all, that also knows the chat templates of its model."""

    def __init__(self, prompts: PromptTokenizer) -> None:
        self._prompts = prompts

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer itself."""
        return self._prompts.vocabulary.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Conversation,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """The prompt that the model's template makes of a conversation: token ids, or the text if not `tokenize`.

        Args:
            conversation: messages, each with a `role` and a `content`.
            tools: what the template may offer as tools.
            documents: what the template may offer to read.
            chat_template: another template, or the name of one of the model's; None: as transformers chooses.
            add_generation_prompt: whether the template opens an answer.
            continue_final_message: whether the last message is left open; or the key of it that is.
            tokenize: whether token ids are wanted.
            kwargs: further variables of the template.

        Raises:
            PenstockError: INVALID_ARGUMENT: no template, no messages, or the template refuses them.
        """
        told = {
            **kwargs,
            "tools": list(tools or ()),
            "documents": list(documents or ()),
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        text, token_ids = self._prompts.render_chat(parse_conversation(conversation, told))
        return token_ids.tolist() if tokenize else text
