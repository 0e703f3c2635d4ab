"""Calls of langchain-openai with its defaults, in an environment of its own: a gateway's URL and a model's name."""

import sys

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

url, name = sys.argv[1:]
chat = ChatOpenAI(model=name, base_url=url, api_key="none", max_tokens=8, temperature=0)

reply = chat.invoke("hello")
assert reply.content
assert reply.usage_metadata["output_tokens"] == 8
assert reply.response_metadata["finish_reason"] == "length"

parts = list(chat.stream("hello", stream_usage=True))
assert "".join(part.content for part in parts) == reply.content
assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 8

turns = [
    SystemMessage("be brief"),
    HumanMessage("hello"),
    AIMessage("hi"),
    HumanMessage([{"type": "text", "text": "go on"}]),
]
assert chat.invoke(turns).content
assert [each.content for each in chat.batch(["hello"] * 4)] == [reply.content] * 4

with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("hello").response_metadata["logprobs"]["content"]
assert len(with_logprobs) == 8
assert all(len(each["top_logprobs"]) == 2 for each in with_logprobs)

assert OpenAI(model=name, base_url=url, api_key="none", max_tokens=5, temperature=0).invoke("abc")

try:
    chat.invoke("long " * 100_000)
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
else:
    raise AssertionError("a prompt that is too long was taken")
