"""Cross-encoders as transformers' own classifiers: scores equal those of each pair alone, or it is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import write_tokenizer
from encoders import ENCODERS, MAX_POSITIONS, VOCAB_SIZE, EncoderCheckpoint
from test_runner_parity import load
from tokenizers import Tokenizer, processors
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from penstock import LLM, PenstockError, PoolingParams
from worker_svc.core.encoder import Padded, PaddedPrompts
from worker_svc.core.transformers_models.encoder_proof import prove_encoder
from worker_svc.core.transformers_models.refusal import NotDoneError
from worker_svc.core.transformers_models.tiny import CROSS_ENCODERS, randomize

TOLERANCE = 2e-5
CPU = torch.device("cpu")
QUERY = "what is a fox?"
DOCUMENTS = ["a fox is a fox", "no", "it is a small animal with a long tail, " * 2, "what", ""]
# A token for each byte: these stand for others that no text has.
CLS, SEP = ("\u0100", 188), ("\u0101", 189)


def save_classifier(directory: Path, encoder: EncoderCheckpoint, **changes: Any) -> PreTrainedModel:
    config = encoder.make_config()
    config.num_labels = changes.pop("num_labels", 1)
    module: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    randomize(module)
    module.eval().save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    cls, sep = ((text, tokenizer.token_to_id(text)) for text, _ in (CLS, SEP))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls[0]} $A {sep[0]}", pair=f"{cls[0]} $A {sep[0]} $B:1 {sep[0]}:1", special_tokens=[cls, sep]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return module


@torch.inference_mode()
def expected(directory: Path, model: PreTrainedModel, pairs: list[tuple[str, str]], **truncation: Any) -> list[float]:
    """The logits of each pair by itself, as transformers' tokenizer makes it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    found = []
    for pair in pairs:
        columns = tokenizer([pair[0]], [pair[1]], return_tensors="pt", return_token_type_ids=True, **truncation)
        if (getattr(model.config, "type_vocab_size", None) or 0) < 2:
            del columns["token_type_ids"]
        found.append(float(model(**columns).logits[0, 0]))
    return found


def scores(llm: LLM, *texts: Any, **options: Any) -> list[float]:
    return [each.outputs.score for each in llm.score(*texts, use_tqdm=False, **options)]


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: encoder.name)
def test_scores_are_those_of_each_pair_by_itself(encoder: EncoderCheckpoint, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, encoder)
    llm = LLM(str(tmp_path), dtype="float32")
    documents = [each[:60] for each in DOCUMENTS]
    wanted = torch.sigmoid(torch.tensor(expected(tmp_path, model, [(QUERY, each) for each in documents])))
    found = scores(llm, QUERY, documents)
    np.testing.assert_allclose(found, wanted.numpy(), atol=TOLERANCE)
    assert len({round(each, 4) for each in found}) == len(documents)
    turned = torch.sigmoid(torch.tensor(expected(tmp_path, model, [(each, QUERY) for each in documents[:2]])))
    np.testing.assert_allclose(scores(llm, documents[:2], [QUERY] * 2), turned.numpy(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "is_sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
    ],
)
def test_the_activation_is_the_one_that_the_checkpoint_says(
    changes: dict[str, Any], is_sigmoid: bool, tmp_path: Path
) -> None:
    model = save_classifier(tmp_path, ENCODERS[0], **changes)
    (logit,) = expected(tmp_path, model, [("a", "b")])
    wanted = float(torch.sigmoid(torch.tensor(logit))) if is_sigmoid else logit
    assert scores(LLM(str(tmp_path), dtype="float32"), "a", "b") == pytest.approx([wanted], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_labels": 3}, "has 3 labels, and a score is one number"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "of another activation"),
    ],
)
def test_other_classifiers_are_refused_by_name(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_classifier(tmp_path, ENCODERS[0], **changes)
    with pytest.raises(PenstockError, match=f"model architecture BertForSequenceClassification .* {why}"):
        load(tmp_path, num_blocks=None)


def test_pairs_are_cut_where_transformers_cuts_them(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ENCODERS[0])
    llm = LLM(str(tmp_path), dtype="float32")
    pairs = [(QUERY, "fox " * 40), (QUERY * 9, "fox")]
    with pytest.raises(PenstockError, match=f"maximum context length is {MAX_POSITIONS} tokens"):
        scores(llm, QUERY, pairs[0][1])
    for most in (-1, 30):
        cut = {"truncation": "longest_first", "max_length": MAX_POSITIONS if most < 0 else most}
        wanted = torch.sigmoid(torch.tensor(expected(tmp_path, model, pairs, **cut)))
        params = PoolingParams(truncate_prompt_tokens=most, truncation_side="right")
        found = scores(llm, [each for each, _ in pairs], [each for _, each in pairs], pooling_params=params)
        np.testing.assert_allclose(found, wanted.numpy(), atol=TOLERANCE)


def test_it_does_nothing_else(tmp_path: Path) -> None:
    save_classifier(tmp_path, ENCODERS[0])
    llm = LLM(str(tmp_path), dtype="float32")
    with pytest.raises(PenstockError, match="is a cross-encoder, which scores pairs of texts"):
        llm.embed("a", use_tqdm=False)
    with pytest.raises(PenstockError, match="is a cross-encoder, which scores pairs of texts"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(PenstockError, match="pairs are texts"):
        llm.score([1, 2], "a", use_tqdm=False)
    for params in (PoolingParams(pooling_type="MEAN"), PoolingParams(dimensions=3), PoolingParams(normalize=False)):
        with pytest.raises(PenstockError, match="cross-encoder"):
            llm.score("a", "b", pooling_params=params, use_tqdm=False)


def test_the_proof_sees_types_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ENCODERS[0].make_config()
    config.num_labels = 1
    assert prove_encoder(config, MAX_POSITIONS, CPU, torch.float32, CROSS_ENCODERS).error < TOLERANCE
    exact = PaddedPrompts.on

    def on(self: PaddedPrompts, *columns: torch.Tensor) -> Padded:
        padded = exact(self, *columns)
        return padded._replace(types=torch.zeros_like(padded.types))

    monkeypatch.setattr(PaddedPrompts, "on", on)
    with pytest.raises(NotDoneError, match="gives prompts of several lengths in a matrix other"):
        prove_encoder(config, MAX_POSITIONS, CPU, torch.float32, CROSS_ENCODERS)


def test_the_head_must_be_there(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_classifier(tmp_path, ENCODERS[0])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: each for name, each in tensors.items() if name != "classifier.weight"}, file, {"format": "pt"})
    with pytest.raises(PenstockError, match=r"lacks the tensor classifier\.weight"):
        load(tmp_path, num_blocks=None)
    assert VOCAB_SIZE > 0
