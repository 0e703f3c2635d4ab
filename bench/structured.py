"""Structured outputs by a validator that is not ours: how many forms are taken, finished, and right.

    penstock bench structured [--model DIR] [--schemas 500] [--regexes 200]

Random JSON schemas and regular expressions (`bench/rig/schemas.py`) are asked of a model in one process, all at once,
at a temperature of 1 and with a frequency penalty, since a small model that may go on in a text likes to. What is
refused is counted by its reason; what is finished is checked by jsonschema-rs and by Python's `re`. The exit status is
1 if one is wrong. Formats (`date-time`, `hostname` …) are looked at apart: JSON Schema has them as remarks, and
grammars follow them nearly.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from typing import Any

import jsonschema_rs

from bench.rig.machine import describe_machine
from bench.rig.schemas import random_regex, random_schema
from contract.domain.errors import PenstockError
from penstock import LLM, SamplingParams, StructuredOutputsParams
from tokenizer_svc.core.grammars import GrammarCompiler

PROMPT = "Tell me about it in a few words."


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="penstock bench structured", description=__doc__, add_help=True)
    parser.add_argument("--model", default="penstock/bundled_model", help="directory of a checkpoint")
    parser.add_argument("--schemas", type=int, default=500, help="JSON schemas")
    parser.add_argument("--regexes", type=int, default=200, help="regular expressions")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an output")
    parser.add_argument("--frequency-penalty", type=float, default=0.5, help="of tokens each time they came [0.5]")
    parser.add_argument("--seed", type=int, default=1, help="of forms and tokens")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    schemas = [random_schema(rng) for _ in range(options.schemas)]
    regexes = [random_regex(rng) for _ in range(options.regexes)]
    print(describe_machine())
    llm = LLM(options.model, seed=options.seed)
    of_schemas = [(StructuredOutputsParams(json=each), each) for each in schemas]
    of_regexes = [(StructuredOutputsParams(regex=each), each) for each in regexes]
    num_wrong = _judge("schemas", llm, options, of_schemas)
    num_wrong += _judge("regexes", llm, options, of_regexes)
    return int(num_wrong > 0)


def _judge(what: str, llm: LLM, options: argparse.Namespace, forms: list[tuple[StructuredOutputsParams, Any]]) -> int:
    """Prints a line for a kind of form; returns how many outputs are wrong."""
    compiler = GrammarCompiler(llm.llm_engine.vocabulary)
    refused: Counter[str] = Counter()
    taken = []
    for form, meaning in forms:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            structured_outputs=form,
            temperature=1.0,
            frequency_penalty=options.frequency_penalty,
        )
        try:
            compiler.compile(form)
        except PenstockError as error:
            refused[error.message] += 1
        else:
            taken.append((params, meaning))
    outputs = llm.generate([PROMPT] * len(taken), [params for params, _ in taken])
    ends = Counter(output.outputs[0].finish_reason for output in outputs)
    wrong = [
        (meaning, output.outputs[0].text, why)
        for output, (_, meaning) in zip(outputs, taken, strict=True)
        if output.outputs[0].finish_reason == "stop" and (why := mistake(meaning, output.outputs[0].text))
    ]
    num_loose = sum(
        bool(mistake(meaning, output.outputs[0].text, validate_formats=True))
        for output, (_, meaning) in zip(outputs, taken, strict=True)
        if output.outputs[0].finish_reason == "stop"
    ) - len(wrong)
    shares = f"taken {len(taken) / max(1, len(forms)):.1%}, of these finished {ends['stop'] / max(1, len(taken)):.1%}"
    print(f"{what:<8} {len(forms)}  {shares} {dict(ends)}  wrong {len(wrong)}, in a format alone {num_loose}")
    cut = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason != "stop"]
    for text in cut[:5]:
        print(f"  cut: … {text[-150:]!r}")
    for message, count in refused.most_common(8):
        print(f"  refused {count}: {message:.140}")
    for meaning, text, why in wrong[:5]:
        print(f"  wrong: {why:.200}; {json.dumps(meaning):.300} gave {text!r:.300}", file=sys.stderr)
    return len(wrong)


def mistake(meaning: Any, text: str, *, validate_formats: bool = False) -> str:
    """The reason why a finished output is not of its form; empty: it is."""
    if isinstance(meaning, str):
        return "" if re.fullmatch(meaning, text, re.ASCII) else "no match"
    try:
        jsonschema_rs.validator_for(meaning, validate_formats=validate_formats).validate(json.loads(text))
    except ValueError as error:  # of the parser's and the validator's
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
