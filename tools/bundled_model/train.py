"""Trains the bundled model from scratch on what the grammar writes.

python -m tools.bundled_model.train --out penstock/bundled_model [--steps N] [--device cuda|cpu]
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from tools.bundled_model.data import IGNORED, Batch, GrammarRows
from tools.bundled_model.tokenizer import (
    CONTEXT_LENGTH,
    END_OF_TEXT,
    TURN_END,
    save_tokenizer,
    special_id,
    train_tokenizer,
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the model becomes."""

    steps: int = 12500
    batch_tokens: int = 32768
    learning_rate: float = 3e-3
    warmup_steps: int = 300
    weight_decay: float = 0.1
    vocabulary: int = 2048
    tokenizer_chats: int = 8000
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 384
    seed: int = 1


TINY = Recipe(
    steps=2, batch_tokens=512, warmup_steps=1, vocabulary=400, tokenizer_chats=20, hidden=32, layers=1, heads=2,
    kv_heads=1, head_dim=16, intermediate=32,
)  # fmt: skip
"""For tests of the script itself: learns nothing, in seconds."""


def new_model(recipe: Recipe, tokenizer: Tokenizer) -> Any:
    """A Qwen3 model with random weights; ``Any``, since the library's decorators hide its methods' signatures."""
    config = Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=special_id(tokenizer, TURN_END),
        pad_token_id=special_id(tokenizer, END_OF_TEXT),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def train(recipe: Recipe, out: Path, device: str, workers: int) -> list[float]:
    """Train a model and save it with its tokenizer in the standard layout; returns the loss of every step."""
    torch.manual_seed(recipe.seed)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    tokenizer = train_tokenizer(recipe.vocabulary, recipe.tokenizer_chats, recipe.seed)
    model = new_model(recipe, tokenizer).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{json.dumps(asdict(recipe))}\n{parameters} parameters, tokenizer ready after {_since(started)}", flush=True)
    losses: list[float] = []
    started = time.monotonic()
    for step, loss in enumerate(_steps(recipe, model, tokenizer, device, workers), 1):
        losses.append(loss)
        if step % max(1, recipe.steps // 40) == 0:
            print(f"step {step} loss {loss:.4f} after {_since(started)}", flush=True)
    save(model, tokenizer, out)
    rate = recipe.steps * recipe.batch_tokens / (time.monotonic() - started)
    print(f"trained {recipe.steps} steps in {_since(started)}, {rate:.0f} tokens a second", flush=True)
    return losses


def save(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder that transformers, and Penstock, load."""
    model.to(dtype=torch.bfloat16)
    model.config.architectures = ["Qwen3ForCausalLM"]
    # The library would otherwise copy the end token alone; a plain completion ends with the other one.
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config(
        eos_token_id=[special_id(tokenizer, TURN_END), special_id(tokenizer, END_OF_TEXT)],
        pad_token_id=special_id(tokenizer, END_OF_TEXT),
    )
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)


def _steps(recipe: Recipe, model: Any, tokenizer: Tokenizer, device: str, workers: int) -> Iterator[float]:
    """Run the training steps; yields the loss of each."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    on_gpu = device.startswith("cuda")
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        fused=on_gpu,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe))
    rows = GrammarRows(tokenizer.to_str(), recipe.batch_tokens, recipe.seed)
    loader: DataLoader[Batch] = DataLoader(
        rows, batch_size=None, num_workers=workers, pin_memory=on_gpu, prefetch_factor=4 if workers else None
    )
    model.train()
    for _, batch in zip(range(recipe.steps), loader, strict=False):
        ids = batch["input_ids"].to(device, non_blocking=True).long()
        labels = batch["labels"].to(device, non_blocking=True).long()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=on_gpu):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            # Logits only where something is to be learned: over half of the tokens are given.
            wanted = labels[:, 1:] != IGNORED
            logits = model.lm_head(hidden[:, :-1][wanted])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][wanted])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        yield loss.item()


def _rate(step: int, recipe: Recipe) -> float:
    """The share of the full learning rate: up, level, and in the last half straight down to nothing."""
    return min(1.0, (step + 1) / recipe.warmup_steps, 2 * (recipe.steps - step) / recipe.steps)


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.1f} s"


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch-tokens", type=int, default=Recipe.batch_tokens)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, help="processes that write text; 12 keep one GPU busy")
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps, batch_tokens=arguments.batch_tokens)
    workers = arguments.workers
    if workers is None:
        workers = min(14, (os.cpu_count() or 1) - 1) if arguments.device.startswith("cuda") else 0
    train(recipe, arguments.out, arguments.device, workers)


if __name__ == "__main__":
    main()
