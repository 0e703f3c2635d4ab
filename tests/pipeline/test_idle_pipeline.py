"""Services that stay awake for a request on its way do for it what others do."""

from pathlib import Path

from in_memory import Pipeline, wait_until

from contract.domain.params import SamplingParams
from contract.v1 import status_pb2
from servicekit.bus.calls import Length

NUM_REQUESTS, NUM_TOKENS = 6, 5
WORKER = {"runner": "simulated", "step_ms": 1.0, "block_size": 4, "num_blocks": 400, "max_num_seqs": 8}


def test_rings_change_no_answer_and_are_counted_nowhere(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    prompts = [[(7 * i + j) % 256 for j in range(1 + 40 * i)] for i in range(NUM_REQUESTS)]
    answers = []
    for stay_awake_ms in (0, 20):
        every = {"stay_awake_ms": stay_awake_ms}
        with Pipeline(checkpoint, worker=WORKER, scheduler={"max_num_batched_tokens": 64}, every=every) as pipeline:
            answers.append([pipeline.client.complete(prompt, params).outputs[0].token_ids for prompt in prompts])
            connection = pipeline.bus.connect()
            assert bool(connection.call(Length(pipeline.bus.keys.bell))) == bool(stay_awake_ms)
            assert connection.call(Length(pipeline.bus.keys.dead)) == 0
            connection.close()
            wait_until(lambda: not pipeline.gateway.stats.num_streams)
            counters = pipeline.scheduler.stats().counters
            assert counters.num_generated_tokens == NUM_REQUESTS * NUM_TOKENS
            assert pipeline.detokenizer.stats().core.num_tokens == NUM_REQUESTS * NUM_TOKENS
            assert _messages(pipeline.tokenizer.status(), "tokenizer_prompts_total") == NUM_REQUESTS
    assert answers[0] == answers[1]


def _messages(status: status_pb2.ServiceStatus, figure: str) -> float:
    return status.figures[figure]
