"""Checks of texts that become tokens."""

from array import array

import numpy as np

from contract.domain.errors import context_exceeded, invalid
from contract.domain.plan import U32
from tokenizer_svc.core.vocabulary import Vocabulary


def check_length(vocabulary: Vocabulary, num_characters: int, param: str) -> None:
    """Refuses a text that cannot fit whatever its tokens are: to find them would take long, for nothing.

    Raises:
        PenstockError: CONTEXT_LENGTH_EXCEEDED.
    """
    context, token_bytes = vocabulary.context_length, vocabulary.max_token_bytes
    if token_bytes and num_characters > context * token_bytes:  # a character has a byte at least
        raise context_exceeded(
            context,
            f"the prompt has {num_characters} characters, which are {-(-num_characters // token_bytes)} tokens at the "
            "very least",
            param,
        )


def known_ids(vocabulary: Vocabulary, ids: list[int], param: str) -> U32:
    """Token ids as an array u32[tokens].

    Raises:
        PenstockError: INVALID_ARGUMENT: the model has no embedding of one.
    """
    # Four times as fast as to make a NumPy array of the list itself.
    token_ids = np.frombuffer(array("I", ids), np.uint32)
    size = vocabulary.vocab_size
    # A tokenizer may have more entries than the model: media tokens, say, that were added and never trained.
    if len(token_ids) and token_ids.max() >= size:
        wrong = int(token_ids[token_ids >= size][0])
        token = vocabulary.tokenizer.id_to_token(wrong)
        raise invalid(
            f"the text becomes the token {token!r:.80} with the id {wrong}, which is outside the model's vocabulary of "
            f"{size} tokens",
            param,
        )
    return token_ids
