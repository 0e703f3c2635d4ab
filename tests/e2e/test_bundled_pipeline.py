"""What a newcomer sees after `make run`: the bundled model answers, token by token."""

import re
import shutil
import subprocess

import openai
import pytest
from served import Served

from contract.domain.params import SamplingParams
from penstock.launcher.layout import BUNDLED_NAME


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_command_streams_an_answer(bundled: Served) -> None:
    match = re.search(r"  (curl .*?'\n)", bundled.out, re.DOTALL)
    assert match
    said = subprocess.run(["sh", "-c", match[1]], capture_output=True, text=True, timeout=300, check=True).stdout
    events = [line for line in said.splitlines() if line.startswith("data: ")]
    assert len(events) > 20
    assert events[-1] == "data: [DONE]"


def test_a_question_gets_sentences_about_its_subject_that_end_by_themselves(bundled: Served) -> None:
    with openai.OpenAI(base_url=f"{bundled.http_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        reply = client.chat.completions.create(
            model=BUNDLED_NAME,
            messages=[{"role": "user", "content": "Tell me a story about a fox."}],
            temperature=0,
            max_tokens=400,
        )
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert "fox" in choice.message.content
    assert choice.message.content.endswith((".", "!", '"'))
    assert choice.message.content.count(".") >= 3


def test_a_conversation_goes_on_and_greedy_answers_repeat(bundled: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=200)
    with bundled.client() as client:
        messages = [{"role": "user", "content": "Who are you?"}]
        first = client.complete(messages=messages, params=params)
        again = client.complete(messages=messages, params=params)
        assert first.text == again.text
        assert again.usage is not None
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Tell me a story."}]
        second = client.complete(messages=messages, params=params)
    assert second.text
    assert second.text != first.text
    assert second.outputs[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.num_cached_tokens > 0


def test_a_story_without_some_words_or_of_some_tokens_only(bundled: Served) -> None:
    question = [{"role": "user", "content": "Tell me a story about a fox."}]
    with openai.OpenAI(base_url=f"{bundled.http_url}/v1", api_key="none", max_retries=0, timeout=300) as client:

        def story(**further: object) -> str:
            reply = client.chat.completions.create(
                model=BUNDLED_NAME, messages=question, temperature=0, max_tokens=100, extra_body=further
            )
            return reply.choices[0].message.content or ""

        # A word that is one token, at the beginning as after a space.
        assert "Ruby" in story()
        assert "Ruby" not in story(bad_words=["Ruby"])
        assert len(set(story(allowed_token_ids=[90], ignore_eos=True))) == 1
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids: token 4000000 is outside"):
            story(allowed_token_ids=[4_000_000])
        with pytest.raises(openai.BadRequestError, match="a bad word must have 1 to 32 tokens"):
            story(bad_words=[" "])
    with bundled.client() as client:
        said = client.complete(messages=question, params={"temperature": 0, "max_tokens": 100, "bad_words": ["Ruby"]})
    assert "Ruby" not in said.text
