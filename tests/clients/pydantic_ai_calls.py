"""An agent of pydantic-ai whose model answers by a script: a gateway's URL and a model's name."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
asked: list[str] = []


def temperature(city: str) -> str:
    """The temperature in a city."""
    asked.append(city)
    return {"Oslo": "it is 4 degrees there", "Rome": "it is 19 degrees there"}[city]


class Answer(BaseModel):
    warmer: str
    degrees: int


TASK = "Which of Oslo and Rome is warmer?"
agent = Agent(model, tools=[temperature])
result = agent.run_sync(TASK)
assert asked == ["Oslo", "Rome"], asked
assert "Rome, by 15 degrees" in result.output
assert result.usage.tool_calls == 2


async def streamed() -> str:
    async with agent.run_stream(TASK) as run:
        return await run.get_output()


asked.clear()
assert asyncio.run(streamed()) == result.output
assert asked == ["Oslo", "Rome"], asked

# A typed answer is a function that must be called: the grammar alone writes it, since the script has no line for it.
typed = Agent(model, output_type=Answer, model_settings={"max_tokens": 2000, "seed": 1})
assert isinstance(typed.run_sync("Say anything.").output, Answer)
