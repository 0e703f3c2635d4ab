"""The prompts that a reply tells: asked of a tokenizer before the call begins, and kept with it from then on."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from contract.domain.errors import invalid
from contract.domain.request import Request
from gateway_svc.core.field_names import in_words_of
from gateway_svc.core.replies import ToldPrompt
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.vocabulary import DetokenizeAsk
from gateway_svc.vocabulary import Vocabulary

MAX_TOLD_TOKENS = 2**20  # of all prompts of a call, whose ids are kept with its reply


async def with_prompts(
    vocabulary: Vocabulary, form: ReplyForm, requests: Sequence[Request], *, echo: bool
) -> ReplyForm:
    """The form of a reply with what it tells of its prompts: their texts where there is an `echo`, their token ids.

    Raises:
        PenstockError: as the request would end; INVALID_ARGUMENT: they have too many tokens; UNAVAILABLE: no tokenizer
            answers.
    """
    with_ids = form.returns_token_ids or form.echoes_logprobs
    if not echo and not with_ids:
        return form
    # The time at which the call was first made, if it is made again: a template may write the date.
    same = [replace(each, header=replace(each.header, arrival_ns=form.arrival_ns)) for each in requests]
    with in_words_of(form.names):
        told = await asyncio.gather(*(_told(vocabulary, each, echo=echo, with_ids=with_ids) for each in same))
    if sum(len(each.token_ids) for each in told) > MAX_TOLD_TOKENS:
        param = "return_token_ids" if form.returns_token_ids else "echo"
        raise invalid(f"{param} is for prompts of {MAX_TOLD_TOKENS} tokens together", param)
    return replace(form, prompts=tuple(told))


async def _told(vocabulary: Vocabulary, request: Request, *, echo: bool, with_ids: bool) -> ToldPrompt:
    prompt, is_cut = request.prompt, request.params.truncate_prompt_tokens is not None
    token_ids: tuple[int, ...] = prompt.token_ids or ()
    if with_ids or is_cut:
        token_ids = tuple((await vocabulary.prepare(request)).token_ids.tolist())
    text = ""
    if echo and prompt.text is not None and not is_cut:
        text = prompt.text
    elif echo:
        text = await vocabulary.detokenize(DetokenizeAsk(request.model, token_ids))
    return ToldPrompt(text, token_ids if with_ids else ())
