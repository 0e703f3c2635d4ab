"""AsyncLLM: what `LLM` answers, to coroutines that come and go."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from simulated_engines import make_vocabulary

from contract.domain.errors import ErrorCode, PenstockError
from penstock import LLM, AsyncLLM, PoolingParams, PoolingRequestOutput, RequestOutput, SamplingParams

LIMIT_S = 300.0
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_vocabulary().tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64,'
        ' "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8192}',
        "utf-8",
    )
    return folder


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(checkpoint), runner="simulated", step_ms=1.0)
    yield llm
    llm.shutdown()


@pytest.fixture
def slow_llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    """An answer of it does not end while a test does something, however slow the machine is."""
    llm = AsyncLLM(str(checkpoint), runner="simulated", step_ms=50.0)
    yield llm
    llm.shutdown()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


@pytest.fixture
def first_is_read(slow_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """After the first step that gives something out, the next ones wait until this is set."""
    is_read, has_output = threading.Event(), False
    engine = slow_llm._llm.llm_engine
    step = engine.step

    def held_step() -> list[RequestOutput]:
        nonlocal has_output
        assert not has_output or is_read.wait(LIMIT_S)
        outputs = step()
        has_output = has_output or bool(outputs)
        return outputs

    monkeypatch.setattr(engine, "step", held_step)
    return is_read


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


def test_requests_at_once_have_the_outputs_of_an_llm(llm: AsyncLLM, checkpoint: Path) -> None:
    async def work() -> list[RequestOutput]:
        return list(await asyncio.gather(*(last(llm.generate([number + 1, 7], GREEDY)) for number in range(40))))

    expected = LLM(str(checkpoint), runner="simulated").generate(
        [[number + 1, 7] for number in range(40)], GREEDY, use_tqdm=False
    )
    found = run(work())
    assert [each.outputs for each in found] == [each.outputs for each in expected]


def test_each_output_is_a_state_of_its_own_that_goes_on_from_the_one_before(
    slow_llm: AsyncLLM, first_is_read: threading.Event
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=1, n=2)

    async def work() -> list[RequestOutput]:
        outputs = slow_llm.generate("abc", params)
        first = await anext(outputs)
        first_is_read.set()
        return [first, *[output async for output in outputs]]

    states = run(work())
    for before, after in pairwise(states):
        for sample, grown in zip(before.outputs, after.outputs, strict=True):
            assert grown.token_ids[: len(sample.token_ids)] == sample.token_ids
            assert sample.logprobs is not None
            assert len(sample.logprobs) == len(sample.token_ids)
    assert len(states[0].outputs[0].token_ids) < 30 == len(states[-1].outputs[0].token_ids)


def test_who_is_late_gets_the_latest(slow_llm: AsyncLLM, first_is_read: threading.Event) -> None:
    async def work() -> tuple[int, RequestOutput]:
        outputs = slow_llm.generate([1, 2], GREEDY)
        await anext(outputs)
        first_is_read.set()
        other = await last(slow_llm.generate([3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)))
        assert len(other.outputs[0].token_ids) == 60
        rest = [output async for output in outputs]
        return len(rest), rest[-1]

    num_more, output = run(work())
    assert num_more == 1
    assert len(output.outputs[0].token_ids) == 20


def test_a_closed_iterator_gives_its_request_up_and_its_id_is_free(slow_llm: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        outputs = slow_llm.generate([1], ENDLESS, "mine")
        await anext(outputs)
        with pytest.raises(PenstockError, match="in use"):
            await anext(slow_llm.generate([2], GREEDY, "mine"))
        await outputs.aclose()
        return await last(slow_llm.generate([2], GREEDY, "mine"))

    output = run(work())
    assert (output.request_id, len(output.outputs[0].token_ids)) == ("mine", 20)
    assert slow_llm.is_running


def test_an_aborted_request_gives_out_what_it_has(slow_llm: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        outputs = slow_llm.generate([1], ENDLESS, "mine")
        await anext(outputs)
        await slow_llm.abort("mine")
        await slow_llm.abort("nobody's")
        return await last(outputs)

    output = run(work())
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 4000


def test_a_cancelled_task_leaves_the_others_alone(slow_llm: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        task = asyncio.create_task(last(slow_llm.generate([1], ENDLESS)))
        await anext(slow_llm.generate([5], GREEDY))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await last(slow_llm.generate([2], GREEDY))

    assert run(work()).finished


def test_a_wrong_prompt_is_refused_and_a_late_request_fails(llm: AsyncLLM) -> None:
    async def work() -> None:
        with pytest.raises(PenstockError) as refused:
            await anext(llm.generate([], GREEDY))
        assert refused.value.code is ErrorCode.INVALID_ARGUMENT
        with pytest.raises(PenstockError) as late:
            await last(llm.generate([1], ENDLESS, timeout_s=0.01))
        assert late.value.code is ErrorCode.DEADLINE_EXCEEDED
        with pytest.raises(AttributeError):
            await anext(llm.generate([1], {"max_tokens": 3}))  # type: ignore[arg-type]
        assert (await last(llm.generate([1], GREEDY))).finished

    run(work())


def test_after_the_end_whatever_runs_fails_and_nothing_is_taken(checkpoint: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(str(checkpoint), runner="simulated", step_ms=50.0) as llm:
            outputs = llm.generate([1], ENDLESS)
            await anext(outputs)
            await asyncio.to_thread(llm.shutdown)
            with pytest.raises(PenstockError, match="shut down"):
                await last(outputs)
            with pytest.raises(PenstockError, match="shut down"):
                await anext(llm.generate([1], GREEDY))
        assert not llm.is_running

    run(work())


def test_an_engine_that_fails_is_told_to_all(slow_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> list[RequestOutput]:
        raise PenstockError(ErrorCode.INTERNAL, "the device failed")

    async def work() -> None:
        outputs = slow_llm.generate([1], ENDLESS)
        await anext(outputs)
        monkeypatch.setattr(slow_llm._llm.llm_engine, "step", step)
        with pytest.raises(PenstockError, match="the device failed"):
            await last(outputs)
        with pytest.raises(PenstockError, match="the device failed"):
            await anext(slow_llm.generate([1], GREEDY))

    run(work())
    assert not slow_llm.is_running


def test_vectors_and_scores_are_those_of_an_llm_also_beside_answers(llm: AsyncLLM, checkpoint: Path) -> None:
    texts, mean = ["one", "another", "a third"], PoolingParams(pooling_type="MEAN", dimensions=8)

    async def work() -> tuple[Any, ...]:
        return await asyncio.gather(
            llm.embed(texts, pooling_params=mean),
            llm.score(texts[0], texts),
            last(llm.generate([1, 2], GREEDY)),
            llm.embed("one", truncate_prompt_tokens=2),
        )

    other = LLM(str(checkpoint), runner="simulated")
    embedded, scored, answered, cut = run(work())
    assert [each.outputs for each in embedded] == [
        each.outputs for each in other.embed(texts, pooling_params=mean, use_tqdm=False)
    ]
    assert [each.outputs for each in scored] == [each.outputs for each in other.score(texts[0], texts, use_tqdm=False)]
    assert len(answered.outputs[0].token_ids) == 20
    assert len(cut[0].prompt_token_ids) == 2


def test_encode_gives_a_vector_out_once_under_the_callers_id(llm: AsyncLLM, checkpoint: Path) -> None:
    async def work() -> list[PoolingRequestOutput]:
        return [output async for output in llm.encode([1, 2, 3], PoolingParams(normalize=False), "mine")]

    (found,) = run(work())
    (wanted,) = LLM(str(checkpoint), runner="simulated").encode([[1, 2, 3]], PoolingParams(normalize=False))
    assert (found.request_id, found.finished, found.prompt_token_ids) == ("mine", True, [1, 2, 3])
    assert found.outputs.data.tolist() == wanted.outputs.data.tolist()


def test_a_wrong_prompt_among_several_is_named_and_ends_the_others(llm: AsyncLLM) -> None:
    async def work() -> tuple[PenstockError, PenstockError]:
        with pytest.raises(PenstockError) as refused:
            await llm.embed([[1] * 5000, [400], [2] * 5000])
        with pytest.raises(PenstockError) as unpaired:
            await llm.score(["a", "b"], ["c", "d", "e"])
        await llm.embed([3])  # it goes on
        return refused.value, unpaired.value

    refused, unpaired = run(work())
    assert (refused.code, refused.message[:11]) == (ErrorCode.INVALID_ARGUMENT, "prompts[1]:")
    assert unpaired.param == "text_1"


def test_an_aborted_prompt_has_no_vector(checkpoint: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(str(checkpoint), runner="simulated", step_ms=50.0, max_num_seqs=1) as llm:
            running = llm.generate([1], ENDLESS)
            await anext(running)  # the one slot is taken
            task = asyncio.ensure_future(anext(llm.encode([2], request_id="mine")))
            await asyncio.sleep(0)
            await llm.abort("mine")
            with pytest.raises(PenstockError) as aborted:
                await task
            assert aborted.value.code is ErrorCode.CANCELLED
            await running.aclose()

    run(work())
