"""A tokenizer for checkpoints that have none, and checkpoints that have nothing else."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(directory: Path, marks: tuple[str, ...] = (), *, are_special: bool = False) -> None:
    """One token for each byte, `<eos>` with id 256, and one for each of the marks; further ids of the model have no
    text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken(mark, special=are_special) for mark in marks])
    tokenizer.save(str(directory / "tokenizer.json"))


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


# As Qwen 3 has it, but shorter.
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}: as <tool_call>{name, arguments}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}assistant:{% if enable_thinking %}<think>\n{% endif %}"
)
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


# As gpt-oss has it, but shorter.
HARMONY_TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    "{% if m.content and m.thinking %}{{ raise_exception('cannot have both content and thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_MARKS = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")


def write_harmony_model(directory: Path, *, max_model_len: int = 512) -> None:
    """A checkpoint for the simulated runner that answers in messages on channels; calls and answers end it."""
    write_byte_model(directory, vocab_size=300, max_model_len=max_model_len)
    write_tokenizer(directory, HARMONY_MARKS, are_special=True)
    template = {"chat_template": HARMONY_TEMPLATE, "eos_token": "<|return|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(template))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))


def write_byte_model(
    directory: Path, *, vocab_size: int = 257, max_model_len: int = 512, chats: bool = False, calls: bool = False
) -> None:
    """A checkpoint for the simulated runner: a token for each byte, `<eos>`, and a chat template if it `chats`, one
    that knows tools and thoughts if it `calls`.
    """
    write_tokenizer(directory, TOOL_MARKS if calls else ())
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": max_model_len,
        "eos_token_id": 256,
    }
    (directory / "config.json").write_text(json.dumps(config))
    if chats or calls:
        template = {"chat_template": TOOL_TEMPLATE if calls else CHAT_TEMPLATE, "eos_token": "<eos>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(template))
