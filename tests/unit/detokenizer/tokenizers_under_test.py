"""Small tokenizers of every family, made here so that no test needs the network."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_CORPUS = [
    "The brook ran past the old mill, and the miller's cat slept in the sun.",
    "Größe, naïve, façade: crème brûlée für alle! Ωμέγα привет мир",
    "日本語のテキストと한국어 텍스트, 汉字。",
    "👩‍👩‍👧‍👦 🎉🎉 é ä́ 1234567890 https://example.org/?q=a&b=<c>",
] * 3


@cache
def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "日本", "é x", " pad "])
    tokenizer.add_special_tokens([AddedToken("<|späť 終|>", special=True)])
    return tokenizer


@cache
def llama2() -> Tokenizer:
    """SentencePiece BPE with byte fallback, as Llama 2 and Mistral."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "▁▁", "a", "b", "é", "日", "▁the", "▁a", "ing", "n", "i", "g", "in", "▁b", "x▁y", "\n", "�"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab, [("i", "n"), ("in", "g")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


@cache
def gemma() -> Tokenizer:
    """Byte fallback without strip."""
    tokenizer = Tokenizer.from_str(llama2().to_str())
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """As T5."""
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁the", -2.0), ("cat", -2.0), ("s", -2.0), ("▁日", -3.0), ("é", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """As BERT."""
    words = ["[UNK]", "[SEP]", "the", "cat", "##s", "##ing", ",", ".", "'", "do", "n't", "日", "##本", "s", "!"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]", "[UNK]"])
    return tokenizer


@cache
def suffixed() -> Tokenizer:
    """BPE with end-of-word suffixes: the text of a token depends on the next one."""
    pieces = ["a", "b", "a</w>", "b</w>", "日</w>", "ab</w>"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@cache
def without_decoder() -> Tokenizer:
    """Tokens are joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


FAMILIES = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "suffixed": suffixed,
    "without_decoder": without_decoder,
}
