"""Which model has answered is told in every chunk and reply."""

import msgspec

from contract.domain.chain import CHAIN_START
from contract.domain.finish import FinishReason, Usage
from contract.domain.rows import TextRow
from gateway_svc.core.ask import Form
from gateway_svc.core.replies import Reply, ReplyHead
from gateway_svc.core.sse import SseFormat
from gateway_svc.core.streams import DeliveredSequence

OLD, NEW = b"old-----", b"new-----"


def head(num_choices: int) -> ReplyHead:
    return ReplyHead(Form.COMPLETION, "cmpl-1", "m", 0, num_choices, include_usage=True)


def row(model_digest: bytes) -> TextRow:
    finish = FinishReason.LENGTH
    return TextRow(b"r" * 16, 0, 0, 0, CHAIN_START, (1,), "a", finish=finish, model_digest=model_digest)


def fingerprint(event: bytes) -> object:
    return msgspec.json.decode(event.removeprefix(b"data: ").partition(b"\n\n")[0]).get("system_fingerprint")


def test_each_chunk_tells_the_model_of_its_prompt_and_the_usage_that_of_all() -> None:
    form = SseFormat(head(2), b"r" * 16, [DeliveredSequence(), DeliveredSequence()])
    form.learn_model([0], OLD)
    form.learn_model([1], NEW)
    assert [fingerprint(form.chunk(choice, row(b""), 0)) for choice in (0, 1)] == [OLD.hex(), NEW.hex()]
    assert fingerprint(form.end([Usage(), Usage()])) is None
    form.learn_model([1], OLD)
    assert fingerprint(form.end([Usage(), Usage()])) == OLD.hex()


def test_a_reply_of_two_models_names_none() -> None:
    for models, expected in (((OLD, OLD), OLD.hex()), ((OLD, NEW), None)):
        reply = Reply(head(2))
        for choice, model_digest in enumerate(models):
            reply.add(choice, row(model_digest))
        assert reply.fields([Usage(), Usage()]).get("system_fingerprint") == expected
