"""lm-eval scores continuations and lets a server generate, by tasks of its own with local data; prints what it got."""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

DOCS = [
    {"question": "The sea was calm and the", "choices": [" ship", " morning star", " of of of"], "answer": 0},
    {"question": "Once upon a time there", "choices": [" was a king", " is", "fore, nothing"], "answer": 0},
    {"question": "Once upon a time", "choices": [" there was", " do not know"], "answer": 1},
    {"question": "“Naïve café”, he said, and", "choices": [" smiled", " 日本"], "answer": 0},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS = [
    COMMON
    | {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    COMMON
    | {
        "task": "generation",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
]


def main(url: str, model: str, tokenizer: str) -> None:
    """Evaluate, and print the answers to every question."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "docs.json")
        data.write_text("\n".join(map(json.dumps, DOCS)))
        for task in TASKS:
            said = task | {"dataset_kwargs": {"data_files": {"test": str(data)}}}
            Path(folder, f"{task['task']}.yaml").write_text(json.dumps(said))  # which is YAML too
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": model,
                "base_url": f"{url}/completions",
                "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface",
                "num_concurrent": 2,
                "max_length": 256,
            },
            tasks=[task["task"] for task in TASKS],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            batch_size=2,
            log_samples=True,
            bootstrap_iters=0,
        )
    scored = [
        {"context": asked[0], "continuation": asked[1], "answer": list(answer[0])}
        for sample in found["samples"]["choices"]
        for asked, answer in zip(sample["arguments"], sample["resps"], strict=True)
    ]
    generated = [
        {"context": sample["arguments"][0][0], "text": sample["resps"][0][0]}
        for sample in found["samples"]["generation"]
    ]
    accuracy = found["results"]["choices"]["acc,none"]
    print(json.dumps({"scored": scored, "generated": generated, "accuracy": accuracy}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
