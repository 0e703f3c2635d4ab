"""Examines a trained model on prompts that no training text has: wordings and pairs of words held out by a hash.

python -m tools.bundled_model.evaluate penstock/bundled_model [--temperature 1.0]
"""

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.bundled_model.dialogue import Dialogue, Turn
from tools.bundled_model.grammar import on_subject, parses

REQUIRED = 0.95
_SHARES = {
    "story": 90, "question": 30, "reading": 10, "poem": 15, "explanation": 20, "fact": 10, "term": 5, "talk": 10,
    "odd": 10,
}  # fmt: skip
_MAX_NEW_TOKENS = 300
_SHOWN_FAILURES = 40
_ROWS = 50


@dataclass(frozen=True)
class Examination:
    """A held-out prompt with the messages before it, and the turn that says what a right answer is."""

    messages: list[dict[str, str]]
    turn: Turn


@dataclass(frozen=True)
class Verdict:
    """The verdict on one answer."""

    answer: str
    parses: bool
    on_subject: bool
    ended: bool

    @property
    def passed(self) -> bool:
        """Return whether the answer is all that is asked for."""
        return self.parses and self.on_subject and self.ended


def held_out_prompts(seed: int = 2024) -> list[Examination]:
    """The 200 prompts of the examination; half of them as typed in a hurry."""
    rng = random.Random(seed)
    prompts: list[Examination] = []
    for kind, count in _SHARES.items():
        for index in range(count):
            dialogue = Dialogue(rng, held_out=True, noise=index % 2 == 1)
            messages: list[dict[str, str]] = []
            if kind == "question":
                told = dialogue.turn("story")
                messages = [{"role": "user", "content": told.user}, {"role": "assistant", "content": told.answer}]
            turn = dialogue.turn(kind)
            prompts.append(Examination([*messages, {"role": "user", "content": turn.user}], turn))
    return prompts


class Examined:
    """A model folder loaded through transformers."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> None:
        # The two factories are untyped in effect: what they return depends on the folder.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device

    def answer(self, chats: list[list[dict[str, str]]], temperature: float = 0.0) -> list[tuple[str, bool]]:
        """The answers to the chats' last messages, each with whether the model ended it by itself."""
        prompts = [self._tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        inputs = inputs.to(self._device)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS, **how)
        ends = self._model.generation_config.eos_token_id
        answers: list[tuple[str, bool]] = []
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((at for at, token in enumerate(row) if token in ends), None)
            answers.append((self._tokenizer.decode(row[:end]), end is not None))
        return answers


def judge(examined: Examined, prompts: list[Examination], temperature: float = 0.0) -> list[Verdict]:
    """Let the model answer every prompt and hold the answers against the grammar."""
    verdicts: list[Verdict] = []
    for start in range(0, len(prompts), _ROWS):
        part = prompts[start : start + _ROWS]
        answers = examined.answer([prompt.messages for prompt in part], temperature)
        for prompt, (answer, ended) in zip(part, answers, strict=True):
            verdicts.append(Verdict(answer, parses(answer), on_subject(prompt.turn.ask, answer), ended))
    return verdicts


def report(prompts: list[Examination], verdicts: list[Verdict], title: str) -> float:
    """Print the figures and some failures; returns the share of the answers that passed."""
    total = len(verdicts)
    print(f"== {title}: {total} held-out prompts")
    for name in ("parses", "on_subject", "ended", "passed"):
        count = sum(getattr(verdict, name) for verdict in verdicts)
        print(f"{name:>12}: {count}/{total} = {100 * count / total:.1f} %")
    kinds = Counter(prompt.turn.kind for prompt in prompts)
    passed = Counter(p.turn.kind for p, verdict in zip(prompts, verdicts, strict=True) if verdict.passed)
    print("     by kind:", ", ".join(f"{kind} {passed[kind]}/{count}" for kind, count in kinds.items()))
    failures = [(p, verdict) for p, verdict in zip(prompts, verdicts, strict=True) if not verdict.passed]
    for prompt, verdict in failures[:_SHOWN_FAILURES]:
        marks = f"parses={verdict.parses} on_subject={verdict.on_subject} ended={verdict.ended}"
        print(f"  failed ({prompt.turn.ask.rule}; {marks})\n    > {prompt.turn.user!r}\n    < {verdict.answer!r}")
    return sum(verdict.passed for verdict in verdicts) / total


def main() -> int:
    """Examine from the command line; the exit status says whether the greedy answers are good enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--temperature", type=float, help="examine sampled answers, too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    examined = Examined(arguments.folder, arguments.device, getattr(torch, arguments.dtype))
    prompts = held_out_prompts()
    share = report(prompts, judge(examined, prompts), "greedy")
    if arguments.temperature:
        verdicts = judge(examined, prompts, arguments.temperature)
        report(prompts, verdicts, f"sampled at temperature {arguments.temperature}")
    return 0 if share >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
