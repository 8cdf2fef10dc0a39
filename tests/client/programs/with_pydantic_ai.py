"""pydantic-ai."""

import asyncio
from typing import Literal

from cases import ASKED, CITIES, DRAWN, PROMPT, THINKING, TOKENS, check_trip, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(
    ASKED["model"], provider=OpenAIProvider(base_url=ASKED["url"], api_key="none")
)


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    sunny: bool


def settings(**more):
    return {"temperature": 0.0} | more


def chat():
    result = Agent(model).run_sync(PROMPT, model_settings=settings(max_tokens=TOKENS))
    assert result.output == ASKED["text"]
    assert result.usage.output_tokens == TOKENS


def stream():
    async def parts():
        agent = Agent(model)
        async with agent.run_stream(PROMPT, model_settings=settings(max_tokens=TOKENS)) as found:
            return [part async for part in found.stream_text(delta=True)]

    assert "".join(asyncio.run(parts())) == ASKED["text"]


def structured():
    trip = (
        Agent(model, output_type=NativeOutput(Trip)).run_sync(PROMPT, model_settings=DRAWN).output
    )
    check_trip(trip.city, trip.days, trip.sunny)


def reasoning():
    options = settings(max_tokens=24, extra_body=THINKING)
    result = Agent(model).run_sync(PROMPT, model_settings=options)
    parts = result.all_messages()[-1].parts
    assert [part.content for part in parts if isinstance(part, ThinkingPart)] == [
        ASKED["reasoning"]
    ]
    assert result.output == ASKED["after"]


def tools():
    """A call, its result, and the answer as a call of another function."""
    called = []
    agent = Agent(model, output_type=ToolOutput(Trip), retries=20)

    @agent.tool_plain
    def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
        """The weather in a city."""
        assert city in CITIES
        called.append(days)
        return "rain"

    for seed in range(20):
        trip = agent.run_sync(PROMPT, model_settings={"temperature": 1.0, "seed": seed}).output
        check_trip(trip.city, trip.days, trip.sunny)
        if called:
            return
    raise AssertionError("20 answers without a call")


def streamed_tools():
    async def last():
        agent = Agent(model, output_type=ToolOutput(Trip))
        async with agent.run_stream(PROMPT, model_settings=DRAWN) as found:
            return await found.get_output()

    trip = asyncio.run(last())
    check_trip(trip.city, trip.days, trip.sunny)


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "reasoning": reasoning,
        "tools": tools,
        "streamed tools": streamed_tools,
    }
)
