"""The answer to a question about a call that is not followed."""

from collections.abc import Sequence
from typing import Any

from contract.domain.finish import Usage
from contract.domain.rows import TextRow
from gateway_svc.core.apis import api_of
from gateway_svc.core.prompt_outputs import PromptOutput
from gateway_svc.core.replies import error_fields
from gateway_svc.core.reply_form import ReplyForm
from gateway_svc.core.streams import error_of


def request_fields(
    form: ReplyForm, state: str, rows: Sequence[Sequence[TextRow]], prompts: Sequence[PromptOutput] = ()
) -> dict[str, Any]:
    """The body of a request's page.

    Args:
        form: of its call.
        state: where it is.
        rows: of each request of the call that has ended, the whole of each sample.
        prompts: what was computed of their prompts, if it is told.
    """
    head = form.head
    fields = {"id": head.call_id, "object": "request", "created": head.created_s, "model": head.model, "state": state}
    failures = (
        form.told_error(error, prompt)
        for prompt, request in enumerate(rows)
        for row in request
        if (error := error_of(row))
    )
    failed = next(failures, None)
    if failed is not None:
        return fields | {"reply": None} | error_fields(failed)
    if len(rows) < len(form.request_ids):
        return fields | {"reply": None, "error": None}
    reply = api_of(form.form).reply(head)
    for prompt, output in enumerate(prompts):
        reply.learn_prompt(range(prompt * form.n, (prompt + 1) * form.n), output)
    for prompt, request in enumerate(rows):
        for row in request:
            reply.add(prompt * form.n + row.sequence, row)
    return fields | {"reply": reply.fields([request[-1].usage or Usage() for request in rows]), "error": None}
