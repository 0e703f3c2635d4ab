"""A tokenizer for checkpoints that have none, and checkpoints that have nothing else."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(directory: Path, marks: tuple[str, ...] = ()) -> None:
    """One token for each byte, `<eos>` with id 256, and one for each of the marks; further ids of the model have no
    text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
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
