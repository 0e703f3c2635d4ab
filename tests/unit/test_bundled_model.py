"""The bundled model, the grammar that it was trained on, and the script that trains it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.bundled_model import lexicon, questions, requests, talk
from tools.bundled_model.data import IGNORED, GrammarRows
from tools.bundled_model.dialogue import Dialogue, plain_text
from tools.bundled_model.evaluate import Examined, held_out_prompts
from tools.bundled_model.grammar import (
    STORY_VARIABLES,
    VARIABLES,
    Ask,
    draw,
    has_held_out_pair,
    on_subject,
    parses,
    wordings,
)
from tools.bundled_model.rules import Grammar
from tools.bundled_model.tokenizer import CHAT_TEMPLATE
from tools.bundled_model.train import TINY, train

FOLDER = Path(__file__).parents[2] / "penstock" / "bundled_model"
FOX = next(word for word in lexicon.CHARACTERS if word.key == "fox")
OWL = next(word for word in lexicon.CHARACTERS if word.key == "owl")
RIVER = next(word for word in lexicon.PLACES if word.key == "river")
STORY = (
    "Near the river lived a brave fox named Mina. One rainy day, Mina went to the river. "
    "She was sad, for she had lost her key. Then Hugo the owl came by. "
    '"Why do you look so sad?" asked Hugo. "I have lost my key," said Mina. '
    "They searched together, and Hugo found it under a stone. "
    "They went home together, and both of them were happy."
)
ALL_WORDINGS = [
    *requests.WORDING_LISTS,
    talk.EXPLANATION_WORDINGS,
    requests.ODD_NOUNS,
    *(one.wordings for one in (*talk.TALKS, *talk.FACTS)),
    *(question.wordings for question in questions.QUESTIONS),
]


@pytest.fixture(scope="module")
def examined() -> Examined:
    torch.set_num_threads(1)
    return Examined(FOLDER, dtype=torch.float32)


# --- the grammar


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), held_out=st.booleans())
def test_parses_and_accepts_whatever_it_writes(seed: int, held_out: bool) -> None:
    dialogue = Dialogue(random.Random(seed), held_out=held_out)
    for _ in range(6):
        turn = dialogue.turn()
        assert parses(turn.answer), turn
        assert on_subject(turn.ask, turn.answer), turn


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_rejects_an_answer_whose_words_are_shuffled_or_cut_off(seed: int) -> None:
    rng = random.Random(seed)
    answer = Dialogue(rng).turn("story").answer
    words = answer.split()
    shuffled = rng.sample(words, len(words))
    assert not parses(" ".join(shuffled))
    assert not parses(" ".join(words[: rng.randrange(1, len(words) - 1)]))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("She was sad", "He was sad"),
        ("a brave fox", "an brave fox"),
        ("Hugo found it", "Otto found it"),
        ("lost my key", "lost my coin"),
        ("the owl", "the fox"),
        ("both of them were happy.", "both of them was happy."),
        ("under a stone.", "under a stone"),
        (" One rainy day", " One rainy day day"),
    ],
)
def test_a_story_with_one_wrong_word_is_not_in_the_language(right: str, wrong: str) -> None:
    assert parses(STORY)
    assert right in STORY
    assert not parses(STORY.replace(right, wrong, 1))


def test_a_story_is_on_subject_only_with_the_words_asked_for_in_their_roles() -> None:
    assert on_subject(Ask("story"), STORY)
    assert on_subject(Ask("story", {"hero": FOX, "place": RIVER, "friend": OWL}), STORY)
    assert not on_subject(Ask("story", {"hero": OWL}), STORY)
    assert not on_subject(Ask("story", {"place": lexicon.PLACES[1]}), STORY)
    assert not on_subject(Ask("poem", {"hero": FOX}), STORY)


def test_only_the_answer_that_fits_the_story_is_right() -> None:
    mina, hugo = (next(word for word in lexicon.NAMES if word.key == name) for name in ("Mina", "Hugo"))
    key = next(word for word in lexicon.OBJECTS if word.key == "key")
    ask = Ask("answer.friend_finds", {"hero": FOX, "hname": mina, "friend": OWL, "fname": hugo, "object": key})
    assert on_subject(ask, "Hugo the owl found the key.")
    assert parses("Mina found the key.")
    assert not on_subject(ask, "Mina found the key.")


@pytest.mark.parametrize("text", ["", " ", "Hello", "Once upon a time", "A fox is.", "I do not know."])
def test_fragments_are_not_answers(text: str) -> None:
    assert not parses(text)


@pytest.mark.parametrize("template", ["[a|b", "a]b", "a|b", "{hero", "<Rule>"])
def test_a_broken_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"template|missing|outside"):
        Grammar({"rule": template}, {})


def test_about_an_eighth_of_the_wordings_is_held_out_and_none_is_ever_trained_on() -> None:
    trained = {wording for one in ALL_WORDINGS for wording in wordings(one, held_out=False)}
    examined = {wording for one in ALL_WORDINGS for wording in wordings(one, held_out=True)}
    assert not trained & examined
    assert trained | examined == {wording for one in ALL_WORDINGS for wording in one}
    assert 0.08 < len(examined) / len(trained | examined) < 0.16
    assert all(wordings(one, held_out=True) for one in requests.WORDING_LISTS)
    assert "Tell me a story about {topic}." in trained


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_no_training_story_has_a_held_out_pair(seed: int) -> None:
    words = draw(random.Random(seed), held_out=False)
    assert set(words) == set(VARIABLES)
    assert words["hero"] is not words["friend"]
    assert not has_held_out_pair(words[name] for name in STORY_VARIABLES)


def test_every_held_out_story_asks_for_words_never_seen_together() -> None:
    prompts = held_out_prompts()
    assert len(prompts) == 200
    asked = [prompt.turn.ask.words for prompt in prompts if prompt.turn.kind in ("story", "poem")]
    assert len(asked) > 100
    assert all(has_held_out_pair(words[name] for name in STORY_VARIABLES if name in words) for words in asked)


# --- the model


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert set(files) >= {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_it_loads_in_transformers_as_qwen3() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER)
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.max_position_embeddings == 2048
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_chat_template_marks_every_turn() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|x|>"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi <|x|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@settings(max_examples=50)
@given(text=st.text())
def test_the_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_greedy_answers_to_held_out_prompts_parse_and_end(examined: Examined) -> None:
    story, explanation = (
        next(prompt for prompt in held_out_prompts() if prompt.turn.kind == kind) for kind in ("story", "explanation")
    )
    answers = examined.answer([story.messages, explanation.messages])
    for prompt, (answer, ended) in zip((story, explanation), answers, strict=True):
        assert ended, answer
        assert parses(answer), answer
        assert on_subject(prompt.turn.ask, answer), (prompt, answer)


# --- the training


def test_two_steps_of_training_leave_a_folder_that_loads(tmp_path: Path) -> None:
    losses = train(TINY, tmp_path / "model", "cpu", workers=0)
    assert len(losses) == TINY.steps
    assert all(0 < loss < 10 for loss in losses)
    answers = Examined(tmp_path / "model").answer([[{"role": "user", "content": "Hello"}]])
    assert len(answers) == 1


def test_only_answers_and_plain_texts_are_learned() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    batch = next(iter(GrammarRows(tokenizer.to_str(), batch_tokens=4096, seed=3)))
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape
    learned = labels != IGNORED
    assert 0.2 < learned.float().mean() < 0.9
    assert torch.equal(ids[learned], labels[learned])
    assert tokenizer.token_to_id("<|im_start|>") not in labels[learned].tolist()
    assert tokenizer.token_to_id("<|im_end|>") in labels[learned].tolist()


def test_plain_texts_are_made_of_whole_sentences() -> None:
    texts = [plain_text(random.Random(seed)) for seed in range(50)]
    assert all(text.endswith((".", '."', "?", "!", '!"', '?"')) for text in texts), texts
