"""A request's prompt becomes token ids, and every limit that a vocabulary and a context set is checked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from contract.domain.beams import MAX_CANDIDATES
from contract.domain.chat_facts import THOUGHT_MARKS
from contract.domain.errors import PenstockError, context_exceeded, invalid
from contract.domain.parameter import Biases, TokenIds
from contract.domain.params import AS_FITS, MAX_BAD_WORD_TOKENS, PARAMETERS, Made, SamplingParams, Stopping
from contract.domain.plan import U32
from contract.domain.request import Prompt, Request
from contract.texts.choice import Decoders
from tokenizer_svc.core.grammars import GrammarCompiler
from tokenizer_svc.core.pairs import PairTokenizer
from tokenizer_svc.core.texts import check_length, known_ids
from tokenizer_svc.core.vocabulary import Vocabulary

_TOOLS = "tools"  # a variable of chat templates, and the field that gives it
_OF_TOKENS = tuple(name for name, each in PARAMETERS.items() if isinstance(each.kind, TokenIds | Biases))


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The part of a prompt that the rest of the pipeline needs."""

    token_ids: U32  # u32[num_prompt_tokens], at least one
    eos_token_ids: tuple[int, ...]  # ascending; the model's, also where the request ignores them
    stopping: Stopping  # the request's, with `max_tokens` resolved to a number that fits the context
    made: Made = field(default_factory=Made)
    num_first_tokens: int = 0  # as in `Admission`


class PromptTokenizer:
    """Turns requests of one model into `TokenizedPrompt`s. Safe to call from several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._grammars = GrammarCompiler(vocabulary)
        self._pairs = PairTokenizer(vocabulary)

    def tokenize(self, request: Request, *, clips: bool = False) -> TokenizedPrompt:
        """Tokenizes and checks one request.

        `clips`: `max_tokens` beyond the context are as many as it leaves; so are those that nobody asked for.

        Raises:
            PenstockError: INVALID_ARGUMENT or CONTEXT_LENGTH_EXCEEDED (caller), naming the field.
        """
        bad_word_ids = self._bad_word_ids(request.params.bad_words or ())
        self._check_params(request, bad_word_ids)
        made = Made(bad_word_ids, self._thinking_token_ids(request.params, bad_word_ids), self._grammar(request))
        clips = clips or "max_tokens" in request.unsaid
        kept, num_first = self._kept(request, clips), 0
        if request.prompt.pair is not None:
            token_ids, num_first = self._pairs.encode(request.prompt.pair, kept)
        else:
            token_ids = self.encode_prompt(request.prompt, now_ns=request.header.arrival_ns, kept=kept)
        stopping = self._resolve(request, len(token_ids), clips)
        return TokenizedPrompt(token_ids, self.vocabulary.eos_token_ids, stopping, made, num_first)

    def _grammar(self, request: Request) -> str:
        """The grammar of the output: beside tools it is theirs, and what is wrong with it is wrong with them."""
        try:
            return self._grammars.compile(request.params.structured_outputs)
        except PenstockError as error:
            if _TOOLS not in request.prompt.required_variables:
                raise
            raise invalid(f"{_TOOLS}: {error.message}", _TOOLS) from error

    def _kept(self, request: Request, clips: bool) -> slice | None:
        """The part of a prompt's tokens that counts; None: all."""
        params = request.params
        num = params.truncate_prompt_tokens
        if num is None:
            return None
        if num == AS_FITS:
            room = 0 if request.pooling is not None else 1 if clips else params.max_tokens or 1
            num = max(1, self.vocabulary.context_length - room)
        return slice(num) if params.truncation_side == "right" else slice(-num, None)

    def encode_prompt(self, prompt: Prompt, *, now_ns: int = 0, kept: slice | None = None) -> U32:
        """The token ids of a prompt: u32[num_prompt_tokens], at least one; the part that is `kept`, if one is given.

        Raises:
            PenstockError: INVALID_ARGUMENT: none or several kinds of prompt, an empty one, or ids out of range;
                CONTEXT_LENGTH_EXCEEDED: a text that is too long whatever its tokens are.
        """
        given = [name for name in ("text", "token_ids", "messages") if getattr(prompt, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise invalid(f"exactly one of text, token ids and messages must be given, got {found}", "prompt")
        if prompt.chat_template_kwargs and prompt.messages is None:
            raise invalid("chat_template_kwargs needs messages", "chat_template_kwargs")
        if prompt.token_ids is not None:
            token_ids = self._check_ids(prompt.token_ids)
        elif prompt.messages is not None:
            text = self._render(prompt, now_ns)
            if kept is None:
                self._check_length(text, "messages")
            token_ids = self.encode(text, add_special_tokens=False, param="messages")
        else:
            if kept is None:
                self._check_length(prompt.text or "", "prompt")
            token_ids = self.encode(prompt.text or "", add_special_tokens=True, param="prompt")
        if not len(token_ids):
            raise invalid("the prompt is empty", "messages" if prompt.messages is not None else "prompt")
        return token_ids if kept is None else token_ids[kept]

    def render_chat(self, prompt: Prompt, *, now_ns: int = 0, add_special_tokens: bool = False) -> tuple[str, U32]:
        """The text that the model's chat template makes of a prompt's messages, and its token ids.

        `add_special_tokens`: the tokenizer's own too, though most templates write them themselves.

        Raises:
            PenstockError: INVALID_ARGUMENT: no template, no messages, or the template refuses them.
        """
        text = self._render(prompt, now_ns)
        return text, self.encode(text, add_special_tokens=add_special_tokens, param="messages")

    def _render(self, prompt: Prompt, now_ns: int) -> str:
        messages, kwargs = prompt.messages or (), prompt.chat_template_kwargs
        return self.vocabulary.chat.render(messages, kwargs, now_ns, required=prompt.required_variables)

    def _check_length(self, text: str, param: str) -> None:
        check_length(self.vocabulary, len(text), param)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            PenstockError: INVALID_ARGUMENT: an id beyond the model's vocabulary.
        """
        self._check_ids(tuple(token_ids), "token_ids")
        text: str = self.vocabulary.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> U32:
        """The token ids of a text: u32[num_tokens].

        Raises:
            PenstockError: INVALID_ARGUMENT: the text holds a lone surrogate, which no UTF-8 can express, or a token of
                the tokenizer that the model has no embedding of.
        """
        try:
            # The batch form lets go of the GIL while it works; `encode` does not.
            (encoding,) = self.vocabulary.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise invalid("the text is not valid Unicode: it holds half of a surrogate pair", param) from error
        return known_ids(self.vocabulary, encoding.ids, param)

    def spell(self, token_ids: U32) -> list[str]:
        """Each of a text's tokens as the vocabulary spells it."""
        spelled = map(self.vocabulary.tokenizer.id_to_token, token_ids.tolist())
        return ["" if token is None else token for token in spelled]

    def token_bytes(self, token_ids: Iterable[int]) -> list[bytes]:
        """The bytes that tokens stand for, each alone, as detokenizers have them; none for one that is not known."""
        return list(map(self._texts.token_bytes, token_ids))

    @cached_property
    def _texts(self) -> Decoders:
        """Found when somebody asks."""
        return Decoders(self.vocabulary.tokenizer)

    def _check_ids(self, token_ids: tuple[int, ...], param: str = "prompt") -> U32:
        size = self.vocabulary.vocab_size
        try:
            ids = np.asarray(token_ids, np.int64)
        except (OverflowError, ValueError, TypeError) as error:
            raise invalid(f"token ids must be integers in [0, {size})", param) from error
        if len(ids) and not (ids.min() >= 0 and ids.max() < size):
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise invalid(f"token id {wrong} is outside the model's vocabulary of {size} tokens", param)
        return ids.astype(np.uint32)

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of words as a text may begin with them and, as vLLM has it, as they follow a space where that is
        another first token and as many.
        """
        found = []
        for word in words:
            plain, spaced = (
                self.encode(space + word.lstrip(), add_special_tokens=False, param="bad_words").tolist()
                for space in ("", " ")
            )
            if not 1 <= len(plain) <= MAX_BAD_WORD_TOKENS:
                found_tokens = f"{word!r:.80} has {len(plain)}"
                raise invalid(f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens, {found_tokens}", "bad_words")
            found.append(tuple(plain))
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(tuple(spaced))
        return tuple(found)

    def _thinking_token_ids(self, params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """The tokens that open and close a thought, where its length is bounded."""
        param = "thinking_token_budget"
        if params.thinking_token_budget is None:
            return ()
        opening, closing = self._id_of(THOUGHT_MARKS[0]), self._id_of(THOUGHT_MARKS[1])
        if opening is None or closing is None:
            marks = " and ".join(THOUGHT_MARKS)
            raise invalid(
                f"{param} needs thoughts between {marks}, each a token of its own, and this model has no such tokens: "
                "leave it out",
                param,
            )
        allowed = params.allowed_token_ids
        is_never = closing in (params.suppress_tokens or ()) or (closing,) in bad_word_ids
        if is_never or (allowed is not None and closing not in allowed):
            raise invalid(
                f"{param} needs the token {closing}, which closes a thought, and the request forbids it", param
            )
        return opening, closing

    def _id_of(self, token: str) -> int | None:
        token_id: int | None = self.vocabulary.tokenizer.token_to_id(token)
        return token_id

    def _check_params(self, request: Request, bad_word_ids: tuple[tuple[int, ...], ...]) -> None:
        size = self.vocabulary.vocab_size
        self._check_beams(request.params)
        for name in _OF_TOKENS:
            ids = getattr(request.params, name) or ()
            if (wrong := max(ids, default=0)) >= size:
                raise invalid(f"{name}: token {wrong} is outside the model's vocabulary of {size} tokens", name)
        if len(set(request.params.suppress_tokens or ())) >= size:
            raise invalid("suppress_tokens leaves no token of the model's vocabulary", "suppress_tokens")
        never = {*(request.params.suppress_tokens or ()), *(word[0] for word in bad_word_ids if len(word) == 1)}
        if len(never) >= size:
            raise invalid("bad_words leave no token of the model's vocabulary", "bad_words")
        allowed = request.params.allowed_token_ids
        if allowed is not None and never.issuperset(allowed):
            raise invalid("suppress_tokens and bad_words leave no token of allowed_token_ids", "allowed_token_ids")

    def _check_beams(self, params: SamplingParams) -> None:
        """Refuses more beams than steps have candidates for: each gives its likeliest tokens, as many as there are
        beams beside those that may end it."""
        if not params.use_beam_search:
            return
        ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.vocabulary.eos_token_ids)}
        most = min(MAX_CANDIDATES, self.vocabulary.vocab_size) - len(ends)
        if params.n > most:
            raise invalid(
                f"n must be at most {most} beside use_beam_search with {len(ends)} tokens that end an output, got "
                f"{params.n}",
                "n",
            )

    def _resolve(self, request: Request, num_prompt_tokens: int, clips: bool) -> Stopping:
        context = self.vocabulary.context_length
        left, is_pooled = context - num_prompt_tokens, request.pooling is not None
        if left < (0 if is_pooled else 1):
            room = "" if is_pooled else " and must leave room for one of output"
            raise context_exceeded(
                context,
                f"the prompt has {num_prompt_tokens} tokens{room}",
                "messages" if request.prompt.messages is not None else "prompt",
            )
        stopping = request.params.stopping
        if is_pooled:  # nothing is generated
            return stopping
        if clips and stopping.max_tokens is not None:
            stopping = replace(stopping, max_tokens=min(stopping.max_tokens, left))
        for name, wanted in (("max_tokens", stopping.max_tokens or 1), ("min_tokens", stopping.min_tokens)):
            if wanted > left:
                raise context_exceeded(
                    context, f"{name} is {wanted}, but the prompt's {num_prompt_tokens} tokens leave {left}", name
                )
        return stopping if stopping.max_tokens is not None else replace(stopping, max_tokens=left)
