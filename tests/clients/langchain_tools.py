"""Tools and typed outputs of langchain-openai, whose model answers by a script: a gateway's URL and a model's name."""

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, name = sys.argv[1:]
chat = ChatOpenAI(model=name, base_url=url, api_key="none", temperature=0)


@tool
def temperature(city: str) -> str:
    """The temperature in a city."""
    return {"Oslo": "it is 4 degrees there", "Rome": "it is 19 degrees there"}[city]


class Pick(BaseModel):
    """A number."""

    number: int = Field(ge=1, le=9)


with_tools = chat.bind_tools([temperature])
for ask in (with_tools.invoke, lambda turns: sum(with_tools.stream(turns), AIMessageChunk(""))):
    turns = [HumanMessage("Which of Oslo and Rome is warmer?")]
    cities = []
    while (reply := ask(turns)).tool_calls:
        turns.append(reply)
        for made in reply.tool_calls:
            cities.append(made["args"]["city"])
            turns.append(temperature.invoke(made))
    assert cities == ["Oslo", "Rome"], cities
    assert reply.content == "Rome, by 15 degrees.", reply.content

# "json_schema" is what it asks for by default, a function that must be called is the older way.
for method in ("json_schema", "function_calling"):
    picked = chat.with_structured_output(Pick, method=method).invoke("pick a number")
    assert isinstance(picked, Pick), picked

forced = chat.bind_tools([temperature], tool_choice="temperature").invoke("how warm is it?", max_tokens=3000)
assert [made["name"] for made in forced.tool_calls] == ["temperature"]
