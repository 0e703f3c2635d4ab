"""The pipeline over gRPC: the typed clients, and what any gRPC tool can ask."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from served import ENDLESS_TOKENS, LONG_MODEL_LEN, Served, expected, wait_until

from contract.domain.errors import ErrorCode, PenstockError
from contract.domain.finish import FinishReason
from contract.domain.params import SamplingParams
from penstock.cli.status import is_complete
from penstock.client import Accepted, AsyncClient, Client, Delta

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def client(simulated: Served) -> Iterator[Client]:
    with simulated.client() as client:
        yield client


def test_a_stream_begins_with_its_acceptance_and_ends_with_its_usage(client: Client) -> None:
    first, *rest = client.generate(PROMPT, GREEDY)
    assert isinstance(first, Accepted)
    assert (first.model, len(first.request_id)) == ("simulated", 32)
    deltas = [event for event in rest if isinstance(event, Delta)]
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected(PROMPT, 24)
    ends = [delta.token_offset + len(delta.token_ids) for delta in deltas]
    assert [delta.token_offset for delta in deltas] == [0, *ends[:-1]]
    assert deltas[-1].finish is FinishReason.LENGTH
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.num_prompt_tokens, deltas[-1].usage.num_output_tokens) == (5, 24)


def test_complete_adds_up_text_ids_and_chats(client: Client) -> None:
    text = client.complete("abc", GREEDY)
    assert text.outputs[0].finish_reason == "length"
    assert len(text.outputs[0].token_ids) == 24
    assert text.text
    chat = client.complete(messages=[{"role": "user", "content": "hello"}], params=GREEDY)
    assert chat.usage is not None
    assert chat.usage.num_prompt_tokens == len("user: hello\nassistant:")


def test_all_parameters_arrive(client: Client) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=6, logprobs=2, stop_token_ids=[5], logit_bias={7: 1.0}, min_p=0.1)
    one, other = client.complete(PROMPT, params).outputs
    assert one.token_ids != other.token_ids
    assert one.logprobs is not None
    assert [next(iter(told)) for told in one.logprobs] == one.token_ids
    assert [[each.rank for each in told.values()] for told in one.logprobs] == [[1, 2]] * len(one.token_ids)
    again = client.complete(PROMPT, params)
    assert [output.token_ids for output in again.outputs] == [one.token_ids, other.token_ids]


@pytest.mark.parametrize(
    ("code", "prompt", "params", "model"),
    [
        (ErrorCode.INVALID_ARGUMENT, "", GREEDY, ""),
        (ErrorCode.INVALID_ARGUMENT, [1_000_000], GREEDY, ""),
        (ErrorCode.MODEL_NOT_FOUND, "abc", GREEDY, "another"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, [1] * (LONG_MODEL_LEN + 1), GREEDY, ""),
    ],
    ids=["empty", "out of vocabulary", "unknown model", "too long"],
)
def test_errors_keep_their_code(
    client: Client, code: ErrorCode, prompt: str | list[int], params: SamplingParams, model: str
) -> None:
    with pytest.raises(PenstockError) as caught:
        client.complete(prompt, params, model=model)
    assert caught.value.code is code
    assert caught.value.message


def test_a_deadline_ends_a_request(client: Client) -> None:
    with pytest.raises(PenstockError) as caught:
        client.complete(PROMPT, SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True), timeout_s=0.5)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


def running(client: Client) -> float:
    return sum(session.owned_requests for session in client.pipeline().sessions if session.kind == "scheduler")


def test_closing_the_iterator_cancels(client: Client) -> None:
    events = client.generate(PROMPT, SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True))
    assert isinstance(next(events), Accepted)
    assert isinstance(next(events), Delta)
    events.close()
    wait_until(lambda: running(client) == 0, "cancelled")


def test_cancel_by_id_ends_the_stream_of_another_call(client: Client) -> None:
    events = client.generate(PROMPT, SamplingParams(max_tokens=ENDLESS_TOKENS, ignore_eos=True))
    accepted = next(events)
    assert isinstance(accepted, Accepted)
    next(events)
    assert client.cancel(accepted.request_id)
    last: Delta | PenstockError | None = None
    try:
        for event in events:
            last = event if isinstance(event, Delta) else last
    except PenstockError as error:
        last = error
    assert last is not None
    assert (last.code is ErrorCode.CANCELLED) if isinstance(last, PenstockError) else last.finish.name == "CANCELLED"
    assert not client.cancel("00" * 16)


def test_many_at_once_over_asyncio_get_what_they_would_alone(simulated: Served) -> None:
    prompts = [[10 + index, 20, 30] for index in range(64)]

    async def run() -> list[list[int]]:
        async with AsyncClient(simulated.grpc_address) as client:
            assert [model.name for model in await client.models()] == ["simulated"]
            done = await asyncio.gather(*(client.complete(prompt, GREEDY) for prompt in prompts))
            return [generation.outputs[0].token_ids for generation in done]

    assert asyncio.run(run()) == [expected(prompt, 24) for prompt in prompts]


def test_the_pipeline_tells_of_all_services_and_hops(client: Client) -> None:
    wait_until(lambda: is_complete(client.pipeline()), "all ready")
    hops = {hop.hop for session in client.pipeline().sessions for hop in session.status.hops}
    assert hops >= {"prompts", "requests", "steps", "results", "tokens", "text"}


def test_every_service_lists_itself_by_reflection(client: Client) -> None:
    names = set()
    for session in client.pipeline().sessions:
        with grpc.insecure_channel(session.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (reply,) = stub.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=300
            )
        names |= {service.name for service in reply.list_services_response.service}
    services = {f"penstock.v1.{name}" for name in ("Inference", "Tokenizer", "Scheduler", "Worker", "Detokenizer")}
    assert names >= services
