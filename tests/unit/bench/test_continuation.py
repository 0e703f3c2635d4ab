"""The audit of what followed the death of a worker: what it calls wrong."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.continuation import Story, report
from bench.rig.teacher import gaps
from penstock.launcher.layout import BUNDLED_MODEL


def story(retold: list[int] | None = None, **fields: object) -> Story:
    return Story([1], token_ids=[5, 6, 7], retold=[5, 6, 7] if retold is None else retold, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "gap", "is_well"),
    [
        (story(deaths=[1]), [0.0, 0.1, 0.0], True),
        (story(deaths=[1]), [0.0, 0.1, 0.9], False),
        (story(deaths=[2, 3]), [0.0, 0.9, 0.0], True),  # no worker had died yet
        (story(retold=[5, 6]), [0.0, 0.0, 0.0], False),
        (story(retold=[5, 6, 8]), [0.0, 0.0, 0.0], False),
        (story(error="lost"), [0.0, 0.0, 0.0], False),
    ],
)
def test_what_is_wrong(seen: Story, gap: list[float], is_well: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = [np.zeros(3, np.float32), np.array(gap, np.float32)]
    assert report([story(), seen], found, 0.5) is is_well
    assert "streams of which no worker died" in capsys.readouterr().out


def test_a_gap_is_the_distance_to_the_likeliest_token() -> None:
    prompt = [5, 100, 7]
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.bfloat16).float()
    greedy: list[int] = []
    for _ in range(4):
        with torch.inference_mode():
            greedy.append(int(model(torch.tensor([prompt + greedy])).logits[0, -1].argmax()))
    unlikely = [*greedy[:3], (greedy[3] + 1) % model.config.vocab_size]
    best, other, none = gaps(BUNDLED_MODEL, "bfloat16", [(prompt, greedy), (prompt, unlikely), (prompt, [])])
    assert best.tolist() == [0, 0, 0, 0]
    assert other[:3].tolist() == [0, 0, 0]
    assert other[3] > 0
    assert none.shape == (0,)
