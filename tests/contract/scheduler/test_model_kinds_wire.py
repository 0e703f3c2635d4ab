"""The kinds of models, and pairs of texts, as services tell them to each other."""

import numpy as np
import pytest

from contract.domain.errors import PoisonMessageError
from contract.domain.model_kind import ModelKind
from contract.domain.params import Sampling, SamplingParams
from contract.domain.plan import Admission, StepPlan
from contract.domain.pooling import SCORED, PoolingFacts, PoolingKind
from contract.domain.request import Header, Prompt, Request
from contract.v1 import results_pb2
from contract.v1.requests_pb2 import GenerateRequest
from contract.wire.pooling import decode_facts, encode_facts
from gateway_svc.wire.operations import decode_worker
from gateway_svc.wire.requests import encode_header, encode_prompt, encode_request
from scheduler_svc.core.limits import WorkerLimits
from scheduler_svc.wire import decode_request, decode_worker_info, encode_plan
from tokenizer_svc.core.tokenize import TokenizedPrompt
from tokenizer_svc.wire import decode_request as decode_tokenizer_request
from tokenizer_svc.wire import encode_tokenized, num_chars
from worker_svc.core.interface import Limits
from worker_svc.wire import decode_plan, worker_info


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


def test_where_the_second_text_of_a_pair_begins_is_told_on_every_hop() -> None:
    ids = np.array([5, 6, 7], np.uint32)
    tokenized = TokenizedPrompt(ids, (), SamplingParams(max_tokens=1).stopping, num_first_tokens=2)
    header = Header(b"r" * 16, "", 0, 0, 0, "", 0)
    request = Request(header, "m", Prompt(pair=("one", "two")), SamplingParams(max_tokens=1), pooling=SCORED)
    body = encode_request(request)
    whole = GenerateRequest.FromString(encode_prompt(request.prompt) + body)
    assert num_chars(whole) == len("onetwo")
    read = decode_tokenizer_request(header, whole)
    assert (read.prompt, read.pooling) == (request.prompt, SCORED)
    queued = decode_request(b"r" * 16, encode_header(header), body, encode_tokenized(tokenized), ids.tobytes())
    assert (queued.num_first_tokens, queued.pooling) == (2, SCORED)
    none = np.empty(0, np.uint32)
    admission = Admission(0, ids, 3, 0, none, Sampling(), 0, pooling=SCORED, num_first_tokens=2)
    plan = decode_plan(encode_plan(StepPlan(1, admissions=(admission,)), b"s" * 16, b"i" * 16, 0)).plan
    assert (plan.admissions[0].num_first_tokens, plan.admissions[0].pooling) == (2, SCORED)
    assert plan.admissions[0].tables == []


@pytest.mark.parametrize("scores_pairs", [True, False])
def test_tokenizers_tell_whether_pairs_are_scored(scores_pairs: bool) -> None:
    facts = PoolingFacts(PoolingKind.CLS, size=8, scores_pairs=scores_pairs)
    assert decode_facts(encode_facts(facts)) == facts
