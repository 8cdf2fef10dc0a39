"""langchain-openai."""

from typing import Literal

from cases import ASKED, CITIES, DRAWN, PROMPT, THINKING, TOKENS, check_trip, check_weather, run
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


def model(**options):
    return ChatOpenAI(
        base_url=ASKED["url"], model=ASKED["model"], api_key="none", max_retries=0,
        **{"temperature": 0, **options},
    )  # fmt: skip


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    sunny: bool


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
    """The weather in a city."""
    assert city in CITIES
    return "rain"


def chat():
    answer = model(max_tokens=TOKENS).invoke(PROMPT)
    assert answer.content == ASKED["text"]
    assert answer.usage_metadata["output_tokens"] == TOKENS


def stream():
    parts = [part.content for part in model(max_tokens=TOKENS).stream(PROMPT)]
    assert "".join(parts) == ASKED["text"]
    assert len(parts) > 2


def structured():
    trip = model(**DRAWN).with_structured_output(Trip, method="json_schema").invoke(PROMPT)
    check_trip(trip.city, trip.days, trip.sunny)


def structured_by_a_call():
    trip = model(**DRAWN).with_structured_output(Trip, method="function_calling").invoke(PROMPT)
    check_trip(trip.city, trip.days, trip.sunny)


def reasoning():
    """It shows what is said, and leaves out fields that it does not know."""
    answer = model(max_tokens=24, extra_body=THINKING).invoke(PROMPT)
    assert answer.content == ASKED["after"]
    assert answer.usage_metadata["output_token_details"]["reasoning"] == 8


def tools():
    first = model(**DRAWN).bind_tools([get_weather], tool_choice="required").invoke(PROMPT)
    assert isinstance(first, AIMessage)
    assert first.tool_calls
    results = [get_weather.invoke(call) for call in first.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    bound = model(max_tokens=TOKENS).bind_tools([get_weather], tool_choice="none")
    assert bound.invoke([HumanMessage(PROMPT), first, *results]).content


def streamed_tools():
    bound = model(**DRAWN).bind_tools([get_weather], tool_choice="get_weather")
    whole = None
    for part in bound.stream(PROMPT):
        whole = part if whole is None else whole + part
    assert whole.tool_calls
    for call in whole.tool_calls:
        assert call["name"] == "get_weather"
        check_weather(call["args"])


run(
    {
        "chat": chat,
        "stream": stream,
        "structured": structured,
        "structured by a call": structured_by_a_call,
        "reasoning": reasoning,
        "tools": tools,
        "streamed tools": streamed_tools,
    }
)
