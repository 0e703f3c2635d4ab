"""An agent of the `openai-agents` package that calls functions until it can answer, over both of OpenAI's APIs."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

URL, MODEL = sys.argv[1:3]
asked: list[str] = []


@function_tool(strict_mode=False)  # where a schema must hold, tokens are drawn by it, and not by the script
def look(city: str) -> str:
    """Tell the weather of a city."""
    asked.append(city)
    return {"Oslo": "cold in Oslo", "Rome": "warm in Rome"}[city]


async def main() -> None:
    """Run the agent on each of them, plain and streamed."""
    set_tracing_disabled(disabled=True)
    client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=900)
    for model in (OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)):
        agent = Agent(name="traveller", instructions="compare cities", tools=[look], model=model)
        asked.clear()
        found = await Runner.run(agent, "compare them")
        check(found.final_output)
        streamed = Runner.run_streamed(agent, "compare them")
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds, kinds
        check(streamed.final_output)


def check(answer: str) -> None:
    """Both cities were asked for, and then there was an answer."""
    assert asked == ["Oslo", "Rome"], asked
    assert answer == "Oslo is cold, Rome is warm.", answer
    asked.clear()


asyncio.run(main())
