"""Turns the grammar's chats into rows of token ids, with labels where the model is to learn."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from tools.bundled_model.dialogue import Dialogue, plain_text, system_prompt
from tools.bundled_model.requests import babble
from tools.bundled_model.tokenizer import CONTEXT_LENGTH, END_OF_TEXT, TURN_END, TURN_START, special_id

IGNORED = -100
"""The label of a token that is given and not to be learned."""

_ROW_LENGTHS = (256, 512, 1024, CONTEXT_LENGTH)
# Counted in batches of equal size: short rows begin anew more often, and a chat begins at position zero when served.
_ROW_WEIGHTS = (45, 30, 13, 12)
_PLAIN_SHARE = 0.15
_LONG_PROMPT_SHARE = 0.02
_TURNS = (1, 1, 1, 2, 2, 3, 4, 6)

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Piece:
    text: str
    learned: bool


class GrammarRows(IterableDataset[Batch]):
    """An endless stream of batches, different in every worker process; each batch has rows of one length."""

    def __init__(self, tokenizer: str, batch_tokens: int, seed: int) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        """Write chats for as long as somebody reads them."""
        # Each worker process is one thread of many; threads of its own would only get in the others' way.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = get_worker_info()
        rng = random.Random(f"{self._seed}/{worker.id if worker else 0}")
        encoder = _Encoder(Tokenizer.from_str(self._tokenizer), rng)
        lengths = [length for length in _ROW_LENGTHS if length <= self._batch_tokens]
        while True:
            (length,) = rng.choices(lengths, _ROW_WEIGHTS[: len(lengths)])
            rows = [encoder.row(length) for _ in range(self._batch_tokens // length)]
            yield {
                "input_ids": torch.tensor([ids for ids, _ in rows], dtype=torch.int32),
                "labels": torch.tensor([labels for _, labels in rows], dtype=torch.int32),
            }


class _Encoder:
    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._end_of_text = special_id(tokenizer, END_OF_TEXT)

    def row(self, length: int) -> tuple[list[int], list[int]]:
        """One row: several short documents after each other, or one chat that goes on for the whole row."""
        ids: list[int] = []
        labels: list[int] = []
        whole_row = self._rng.random() < 0.4
        while len(ids) < length:
            pieces = self._chat(10**6, length) if whole_row else self._document(length)
            encodings = self._tokenizer.encode_batch_fast([piece.text for piece in pieces])
            for piece, encoding in zip(pieces, encodings, strict=True):
                ids += encoding.ids
                labels += encoding.ids if piece.learned else [IGNORED] * len(encoding.ids)
            if ids[-1] != self._end_of_text:
                ids.append(self._end_of_text)
                labels.append(IGNORED)
        return ids[:length], labels[:length]

    def _document(self, length: int) -> list[_Piece]:
        rng = self._rng
        if rng.random() < _PLAIN_SHARE:
            # Whatever a plain prompt says, a story is what follows.
            prefix = babble(rng, rng.randint(1, 12)) + rng.choice((". ", " ", "\n")) if rng.random() < 0.15 else ""
            return [_Piece(prefix, learned=False), _Piece(plain_text(rng) + END_OF_TEXT, learned=True)]
        return self._chat(rng.choice(_TURNS), length)

    def _chat(self, turns: int, length: int) -> list[_Piece]:
        """A chat of so many turns, or of as many as it takes to fill the length."""
        rng = self._rng
        pieces: list[_Piece] = []
        system = system_prompt(rng)
        if system is not None:
            pieces.append(_Piece(f"{TURN_START}system\n{system}{TURN_END}\n", learned=False))
        dialogue = Dialogue(rng)
        # Four characters a token is a little less than the tokenizer reaches, so the chat is rather too long.
        characters = 0
        while turns and characters < 5 * length:
            turns -= 1
            turn = dialogue.turn()
            user = turn.user
            if turn.kind == "odd" and length >= 512 and rng.random() < _LONG_PROMPT_SHARE * length / 512:
                user = babble(rng, rng.randint(length // 16, length // 6))
            pieces.append(_Piece(f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n", learned=False))
            pieces.append(_Piece(f"{turn.answer}{TURN_END}", learned=True))
            pieces.append(_Piece("\n", learned=False))
            characters += len(user) + len(turn.answer)
        return pieces
