"""Calls of instructor with its defaults, in an environment of its own: a gateway's URL and a model's name."""

import sys
from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

url, name = sys.argv[1:]
server = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)
chat = [{"role": "user", "content": "how warm is it?"}]


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)
    is_warm: bool


# Modes differ in what they ask the server for: a function that must be called, a JSON schema, JSON of any form.
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(server, mode=mode)
    weather, reply = client.chat.completions.create_with_completion(
        model=name, response_model=Weather, messages=chat, max_retries=0, seed=3
    )
    assert isinstance(weather, Weather), weather
    assert weather.city in ("Oslo", "Rome")
    assert reply.usage.completion_tokens > 0
    parts = list(client.chat.completions.create_partial(model=name, response_model=Weather, messages=chat, seed=3))
    assert len(parts) > 1
    Weather.model_validate(parts[-1].model_dump())

client = instructor.from_openai(server)
several = client.chat.completions.create(
    model=name, response_model=Iterable[Weather], messages=chat, max_tokens=400, seed=4, max_retries=2
)
assert all(isinstance(each, Weather) for each in several)
