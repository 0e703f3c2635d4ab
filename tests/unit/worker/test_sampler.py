"""The sampler as a pure function: distribution, penalties, masks, logprobs, independence of the batch."""

import itertools

import numpy as np
import pytest
import torch

from contract.domain import chain
from worker_svc.core.kernels.sampling.changes import Changes, Entries
from worker_svc.core.noise import mix, uniform
from worker_svc.core.sampler import Draw, Penalties, SamplerInput, Truncation, sample

VOCAB = 12
NUM_DRAWS = 20_000


def truncation(rows: int, top_k: int = 0, top_p: float = 1.0, longest: int | None = None) -> Truncation:
    return Truncation(torch.arange(rows), torch.full((rows,), top_k), torch.full((rows,), top_p), longest)


def draw(rows: int, temperature: float = 1.0, seed: int = 5, **rest: object) -> Draw:
    """Row i draws position i of one sequence."""
    return Draw(
        torch.arange(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), seed),
        torch.arange(rows),
        **rest,  # type: ignore[arg-type]
    )


def kept_probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The exact distribution, one token at a time."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(logits)), key=lambda token: -weights[token])
    if top_k:
        order = order[:top_k]
    total, kept, sum_before = weights[order].sum(), [], 0.0
    for token in order:
        if sum_before < top_p * total or top_p == 1.0:
            kept.append(token)
        sum_before += weights[token]
    kept = [token for token in kept if weights[token] >= min_p * weights.max()]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [*itertools.product([1.0, 0.6], [0, 5], [1.0, 0.8], [0.0, 0.12]), (2.5, 3, 0.5, 0.5), (1.0, 1, 1.0, 0.0)],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, VOCAB)
    rows = torch.tensor(logits, dtype=torch.float32).expand(NUM_DRAWS, -1)
    asked = SamplerInput(
        draw(
            NUM_DRAWS,
            temperature,
            truncation=truncation(NUM_DRAWS, top_k, top_p, top_k or None) if top_k or top_p < 1 else None,
            min_p=torch.full((NUM_DRAWS,), min_p) if min_p else None,
        )
    )
    counts = np.bincount(sample(rows, asked).token_ids.numpy(), minlength=VOCAB)
    expected = kept_probabilities(logits, temperature, top_k, top_p, min_p) * NUM_DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 1  # four standard deviations; the draws are fixed


def test_noise_is_splitmix64_of_seed_and_position() -> None:
    seed, position = 2**63 + 12345, 77
    key = chain.mix(seed ^ chain.mix(position))
    state, expected = key, []
    for _ in range(5):
        expected.append(chain.mix(state) >> 32)
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    numbers = uniform(torch.tensor([seed - 2**64]), torch.tensor([position]), torch.arange(5).unsqueeze(0))
    assert numbers[0].tolist() == pytest.approx([(bits + 0.5) / 2**32 for bits in expected], rel=1e-6)


def test_tensor_mix_equals_the_domain_s() -> None:
    values = [0, 1, 2**31, 2**62 + 9, 2**63, 2**64 - 1]
    signed = torch.tensor([value - 2**64 if value >= 2**63 else value for value in values])
    assert [value % 2**64 for value in mix(signed).tolist()] == [chain.mix(value) for value in values]


def test_noise_is_spread_evenly_and_never_reaches_its_ends() -> None:
    numbers = uniform(torch.tensor([1, 2]), torch.tensor([9, 9]), torch.arange(100_000).expand(2, -1))
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    assert numbers.mean(1).tolist() == pytest.approx([0.5, 0.5], abs=0.005)
    assert abs(float(torch.corrcoef(numbers)[0, 1])) < 0.01


def test_a_row_s_token_does_not_depend_on_the_batch() -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 500, generator=rng) * 2
    top_k = torch.tensor([0, 1, 7, 50] * 10)
    top_p = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.99] * 8)
    temperature = torch.tensor([0.3, 1.0, 1.7, 0.8] * 10)
    seeds, positions = torch.arange(40) * 1_000_003, torch.arange(40) + 11

    def tokens(rows: list[int]) -> list[int]:
        index = torch.tensor(rows)
        longest = int(top_k[index].max()) if bool((top_k[index] > 0).all()) else None
        cut = Truncation(torch.arange(len(rows)), top_k[index], top_p[index], longest)
        asked = Draw(torch.arange(len(rows)), temperature[index], seeds[index], positions[index], cut)
        return sample(logits[index], SamplerInput(asked)).token_ids.tolist()

    together = tokens(list(range(40)))
    assert [tokens([row])[0] for row in range(40)] == together
    assert tokens(list(range(39, -1, -1))) == together[::-1]


def test_greedy_rows_stay_greedy_beside_drawn_ones() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([1, 4])
    asked = Draw(rows, torch.ones(2), torch.tensor([1, 2]), torch.tensor([8, 9]))
    token_ids = sample(logits, SamplerInput(asked)).token_ids
    alone = sample(
        logits[rows], SamplerInput(Draw(torch.arange(2), *(asked.temperature, asked.seeds, asked.positions)))
    )
    greedy = torch.tensor([0, 2, 3, 5])
    assert torch.equal(token_ids[greedy], logits[greedy].argmax(1))
    assert torch.equal(token_ids[rows], alone.token_ids)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[50.0, 49.9, -300.0]]).expand(64, -1)
    assert sample(logits, SamplerInput(draw(64, 1e-38))).token_ids.tolist() == [0] * 64


def test_top_p_keeps_at_least_the_most_likely_token() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]]).expand(64, -1)
    asked = SamplerInput(draw(64, truncation=truncation(64, top_p=1e-9)))
    assert set(sample(logits, asked).token_ids.tolist()) == {0}


def test_equally_likely_tokens_at_the_border_all_stay() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -5.0]]).expand(400, -1)
    asked = SamplerInput(draw(400, truncation=truncation(400, top_k=2, longest=2)))
    assert set(sample(logits, asked).token_ids.tolist()) == {0, 1, 2, 3}


def penalised(
    logits: np.ndarray, tokens: list[int], num_prompt: int, setting: tuple[float, float, float]
) -> list[float]:
    rep, pres, freq = setting
    row = logits.astype(np.float64).copy()
    for token in set(tokens):
        row[token] = row[token] / rep if row[token] > 0 else row[token] * rep
    for token in set(tokens[num_prompt:]):
        row[token] -= pres + freq * tokens[num_prompt:].count(token)
    return row.tolist()


def test_penalties_equal_a_plain_reference() -> None:
    rng = np.random.default_rng(4)
    settings = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.4), (0.6, -1.5, 1.1)]
    histories = [rng.integers(0, VOCAB, length).tolist() for length in (1, 5, 30, 17)]
    prompts = [1, 3, 10, 17]
    logits = rng.normal(0, 2, (6, VOCAB)).astype(np.float32)
    padded = torch.full((4, 30), VOCAB - 1)
    for row, history in enumerate(histories):
        padded[row, : len(history)] = torch.tensor(history)
    rows = [0, 2, 3, 5]
    asked = Penalties(
        torch.tensor(rows),
        padded,
        torch.tensor([len(history) for history in histories]),
        torch.tensor(prompts),
        *(torch.tensor([setting[index] for setting in settings]) for index in range(3)),
    )
    # A bias large enough on one token after the other makes the penalised logits visible as greedy choices.
    expected = {row: penalised(logits[row], histories[i], prompts[i], settings[i]) for i, row in enumerate(rows)}
    for row in range(6):
        order = np.argsort(expected.get(row, logits[row]))[::-1]
        hidden: list[int] = []
        for token in order.tolist():
            banned = Entries(
                torch.full((len(hidden),), row),
                torch.tensor(hidden, dtype=torch.long),
                torch.full((len(hidden),), -1e9),
            )
            result = sample(torch.tensor(logits), SamplerInput(penalties=asked, changes=Changes(banned)))
            assert int(result.token_ids[row]) == token
            hidden.append(token)


def test_bias_and_forbidden_tokens_move_the_choice_and_leave_other_rows() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    entries = Entries(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2]), torch.tensor([2.5, 50.0, -torch.inf]))
    assert sample(logits, SamplerInput(changes=Changes(entries))).token_ids.tolist() == [0, 1, 2]
    assert logits[0].tolist() == [1.0, 2.0, 3.0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(9)) * 3
    bias = Entries(torch.arange(5), torch.full((5,), 17), torch.full((5,), 100.0))
    asked = SamplerInput(changes=Changes(bias), logprob_rows=torch.tensor([1, 3]), num_top_logprobs=4)
    result = sample(logits, asked)
    exact = logits.double().log_softmax(-1)
    assert result.token_ids.tolist() == [17] * 5
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.logprobs.tolist() == pytest.approx(exact[[1, 3], 17].tolist(), abs=1e-5)
    values, ids = exact[[1, 3]].topk(4)
    assert result.top_ids.tolist() == ids.tolist()
    assert result.top_logprobs.flatten().tolist() == pytest.approx(values.flatten().tolist(), abs=1e-5)
    assert result.ranks is not None
    assert result.ranks.tolist() == [exact[row].sort(descending=True).indices.tolist().index(17) + 1 for row in (1, 3)]


def test_tokens_that_are_equally_likely_have_the_rank_of_the_first_of_them() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 3.0, 2.0]]).repeat(5, 1)
    forced = Entries(torch.arange(5), torch.arange(5), torch.full((5,), 100.0))
    result = sample(logits, SamplerInput(changes=Changes(forced), logprob_rows=torch.arange(5)))
    assert result.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert result.ranks is not None
    assert result.ranks.tolist() == [5, 2, 2, 1, 2]


def test_penalties_come_before_bias_and_bias_before_temperature() -> None:
    # Halved and then raised, the first token beats the second; raised and then halved, it would not.
    logits = torch.tensor([[1.0, 1.2, -5.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    seen = Penalties(torch.tensor([0]), torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1]), 2 * one, zero, zero)
    raised = Entries(torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0]))
    assert sample(logits, SamplerInput(penalties=seen, changes=Changes(raised))).token_ids.tolist() == [0]
    # (-2 + 1) / 2 is e^-0.5 as likely as the best, which min-p 0.8 drops; -2 / 2 + 1 would be as likely as the best.
    logits = torch.tensor([[0.0, -2.0]]).expand(200, -1)
    raised = Entries(torch.arange(200), torch.ones(200, dtype=torch.long), torch.ones(200))
    drawn = draw(200, temperature=2.0, min_p=torch.full((200,), 0.8))
    assert set(sample(logits, SamplerInput(drawn, changes=Changes(raised))).token_ids.tolist()) == {0}


def test_top_p_counts_what_top_k_left_and_min_p_comes_last() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(400, -1)

    def possible(top_k: int, top_p: float, min_p: float | None = None) -> set[int]:
        cut = truncation(400, top_k, top_p, top_k or None)
        shares = None if min_p is None else torch.full((400,), min_p)
        return set(sample(logits, SamplerInput(draw(400, truncation=cut, min_p=shares))).token_ids.tolist())

    assert possible(0, 0.55) == {0, 1}
    assert possible(2, 0.55) == {0}  # 0.4 / 0.7 is more than 0.55
    assert possible(3, 0.95) == {0, 1, 2}
    assert possible(3, 0.95, min_p=0.6) == {0, 1}
