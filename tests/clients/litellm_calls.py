"""Calls of litellm with its defaults; run in an environment of its own with a gateway's URL and a model's name."""

import asyncio
import json
import sys

import litellm

url, name = sys.argv[1:]
chat = {"model": f"openai/{name}", "api_base": url, "api_key": "none"}
messages = [{"role": "user", "content": "hello"}]

reply = litellm.completion(messages=messages, max_tokens=8, temperature=0, **chat)
text = reply.choices[0].message.content
assert text
assert reply.usage.completion_tokens == 8

chunks = list(
    litellm.completion(
        messages=messages, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}, **chat
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage.completion_tokens == 8
assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:].count("length") >= 1


async def stream_several() -> list[str]:
    async def one() -> str:
        stream = await litellm.acompletion(messages=messages, max_tokens=8, temperature=0, stream=True, **chat)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return await asyncio.gather(*(one() for _ in range(5)))


assert asyncio.run(stream_several()) == [text] * 5

completion = litellm.text_completion(
    model=f"text-completion-openai/{name}", api_base=url, api_key="none", prompt="abc", max_tokens=5, temperature=0
)
assert completion.choices[0].text

try:
    litellm.completion(messages=[{"role": "user", "content": "long " * 100_000}], max_tokens=1, **chat)
except litellm.ContextWindowExceededError as error:
    assert "maximum context length" in str(error)
else:
    raise AssertionError("a prompt that is too long was taken")

# What is not there is refused by name.
try:
    litellm.completion(messages=messages, max_tokens=1, response_format={"type": "json_schema"}, **chat)
except litellm.BadRequestError as error:
    assert "response_format" in str(error)
else:
    raise AssertionError("a response_format without a schema was taken")

schema = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
reply = litellm.completion(messages=messages, max_tokens=100, response_format=described, **chat)
assert set(json.loads(reply.choices[0].message.content)) == {"ok"}
