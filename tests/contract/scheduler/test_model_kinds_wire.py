"""The kinds of models that workers tell, as schedulers and gateways read them."""

import pytest

from contract.domain.errors import PoisonMessageError
from contract.domain.model_kind import ModelKind
from contract.v1 import results_pb2
from gateway_svc.wire.operations import decode_worker
from scheduler_svc.core.worker import WorkerLimits
from scheduler_svc.wire import decode_worker_info
from worker_svc.core.interface import Limits
from worker_svc.wire import worker_info


def test_an_encoder_tells_that_it_keeps_nothing() -> None:
    limits = Limits(0, 16, 8, 512, 2048, 100, model_kind=ModelKind.ENCODER)
    info = worker_info(limits, model="m", home_shard=0, world_size=1, device="cpu", model_digest=b"digest--")
    offer = decode_worker_info(info.SerializeToString())
    assert offer.limits == WorkerLimits(0, 16, 8, 512, 2048, model_kind=ModelKind.ENCODER)
    assert (offer.limits.kinds, offer.limits.capacity) == ((), 512)
    offered = decode_worker(info.SerializeToString())
    assert (offered.kind, offered.max_model_len, offered.num_blocks) == (ModelKind.ENCODER, 512, 0)


@pytest.mark.parametrize(("kind", "num_blocks"), [(0, 0), (1, 0), (99, 10)])
def test_a_decoder_without_blocks_and_a_kind_that_is_not_known_are_not_served(kind: int, num_blocks: int) -> None:
    info = results_pb2.WorkerInfo(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=8,
        max_model_len=512,
        kind=kind,  # type: ignore[arg-type]
    )
    with pytest.raises(PoisonMessageError, match=r"without blocks|not a kind of model"):
        decode_worker_info(info.SerializeToString())


def test_a_worker_that_says_nothing_of_its_kind_is_a_decoder() -> None:
    info = results_pb2.WorkerInfo(num_blocks=8, block_size=16, max_num_seqs=8, max_model_len=512)
    assert decode_worker_info(info.SerializeToString()).limits.model_kind is ModelKind.DECODER
