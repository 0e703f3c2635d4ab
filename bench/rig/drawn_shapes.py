"""Shapes by their names: those of published models, such whose experts are not chosen alike, and dense ones that no
table of tuning was written for, drawn by a seed.
"""

import random
import re
from dataclasses import replace

from bench.rig.shapes import LLAMA, QWEN2, QWEN3, SHAPES, Shape

_NAME = re.compile(r"drawn-(\d+)-(\d+)")
_SKEWED = "-zipf"
_HEAD_DIM = 128
_NUM_PARAMETERS = 7.6e9  # about, as Qwen3-8B
_FAMILIES = {
    "LlamaForCausalLM": {**LLAMA, "rope_theta": 500_000.0},
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}


def find_shape(name: str) -> Shape:
    """One of `SHAPES`, one of these as NAME-zipf, whose experts are chosen by Zipf's law, or `drawn-SEED-NUMBER`.

    Raises:
        ValueError: nothing has this name.
    """
    if name in SHAPES:
        return SHAPES[name]
    of_experts = SHAPES.get(name.removesuffix(_SKEWED))
    if of_experts is not None and of_experts.experts is not None:
        return replace(of_experts, experts=replace(of_experts.experts, skew=1.0))
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"no shape is called {name}: there are {', '.join(SHAPES)}, those with experts as NAME{_SKEWED}, and "
            "drawn-SEED-NUMBER"
        )
    return _draw(random.Random(name))


def _draw(rng: random.Random) -> Shape:
    architecture = rng.choice(sorted(_FAMILIES))
    num_heads = 2 * rng.randint(10, 20)
    num_kv_heads = rng.choice([each for each in (2, 4, 8) if num_heads % each == 0])
    hidden_size = num_heads * _HEAD_DIM  # vLLM has no other heads of Qwen2's
    intermediate_size = 128 * round(hidden_size * rng.uniform(2.5, 5.0) / 128)
    vocab_size = rng.choice((32_000, 100_352, 128_256, 152_064))
    of_layer = hidden_size * (_HEAD_DIM * 2 * (num_heads + num_kv_heads) + 3 * intermediate_size)
    num_layers = round((_NUM_PARAMETERS - vocab_size * hidden_size) / of_layer)
    return Shape(
        architecture,
        *(hidden_size, num_layers, num_heads, num_kv_heads, _HEAD_DIM, intermediate_size, vocab_size),
        fields=_FAMILIES[architecture],
    )
