"""An agent of smolagents whose model answers by a script: a gateway's URL and a model's name."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

url, name = sys.argv[1:]
asked: list[str] = []


@tool
def temperature(city: str) -> str:
    """The temperature in a city.

    Args:
        city: its name.
    """
    asked.append(city)
    return {"Oslo": "it is 4 degrees there", "Rome": "they say that it is 19 degrees"}[city]


model = OpenAIModel(name, api_base=url, api_key="none")
for streams in (False, True):
    asked.clear()
    agent = ToolCallingAgent(tools=[temperature], model=model, stream_outputs=streams, verbosity_level=0)
    answer = agent.run("Which of Oslo and Rome is warmer?", max_steps=6)
    assert asked == ["Oslo", "Rome"], asked
    assert "Rome, by 15 degrees" in str(answer), answer
