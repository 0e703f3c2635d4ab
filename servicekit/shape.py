"""The settings that all services of a pool must agree on: one that differs would leave requests where nobody looks."""

import hashlib
from collections.abc import Iterable, Mapping

PROTOCOL = "5"  # of messages and bus functions: raised by a change that services of before cannot live with

Shape = Mapping[str, str]  # part → value, both without spaces; a service tells the parts that it knows


def pool_shape(
    num_shards: int,
    *,
    vocabulary: Mapping[str, int] | None = None,
    chat_templates: Mapping[str, str] | None = None,
    generation_defaults: Mapping[str, object] | None = None,
) -> Shape:
    """The parts that a service knows.

    Args:
        num_shards: of the token log.
        vocabulary: token → id, of a service that reads the tokenizer.
        chat_templates: name → source, of one that reads them.
        generation_defaults: name → value, of one that tells what holds where a request does not say otherwise.
    """
    shape = {"num_shards": str(num_shards), "protocol": PROTOCOL}
    if vocabulary is not None:
        shape["vocabulary"] = _digest((token, str(token_id)) for token, token_id in vocabulary.items())
    if chat_templates is not None:
        shape["chat_template"] = _digest(chat_templates.items())
    if generation_defaults is not None:
        shape["generation_defaults"] = _digest((name, str(value)) for name, value in generation_defaults.items())
    return shape


def _digest(pairs: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(pairs):
        digest.update(b"%d:%d:" % (len(name), len(value)) + name.encode("utf-8", "surrogatepass"))
        digest.update(value.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
