"""`POST /v1/messages/count_tokens`: how many tokens the prompt of a message has."""

from contract.domain.errors import PenstockError
from gateway_svc.core.anthropic.fields import MESSAGE_FIELDS
from gateway_svc.core.anthropic.parse import parse_prompt
from gateway_svc.core.ask import Models
from gateway_svc.core.replies import encode
from gateway_svc.core.unsupported import unknown_field
from gateway_svc.core.vocabulary import TokenizeAsk, Tokenized


def parse_count(body: bytes, models: Models) -> TokenizeAsk:
    """The chat whose tokens are counted.

    Raises:
        PenstockError: INVALID_ARGUMENT or UNIMPLEMENTED, naming the field; what `models` raises.
    """
    ask = parse_prompt(body, models)
    return TokenizeAsk(
        ask.model,
        ask.prompts[0],
        add_special_tokens=False,  # the template writes them
        wants_strings=False,
        ignored_fields=ask.ignored_fields,
        names=ask.names,
    )


def refused_count_field(ask: TokenizeAsk) -> PenstockError | None:
    """The error of a call with fields that nobody knows, where such are refused; None: it has none."""
    return unknown_field("message", ask.ignored_fields[0], MESSAGE_FIELDS) if ask.ignored_fields else None


def count_reply(found: Tokenized) -> bytes:
    """The body of the answer."""
    return encode({"input_tokens": len(found.token_ids)})
