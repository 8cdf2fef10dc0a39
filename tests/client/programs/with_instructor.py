"""instructor."""

from typing import Literal

import instructor
from cases import ASKED, DRAWN, PROMPT, check_trip, run
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

ALWAYS = {
    "model": ASKED["model"],
    **DRAWN,
    "messages": [{"role": "user", "content": PROMPT}],
    "max_retries": 0,
}


class Trip(BaseModel):
    """A trip to a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)
    sunny: bool


def client(mode):
    official = OpenAI(base_url=ASKED["url"], api_key="none", max_retries=0)
    return instructor.from_openai(official, mode=mode)


def ask(mode):
    trip = client(mode).chat.completions.create(**ALWAYS, response_model=Trip)
    check_trip(trip.city, trip.days, trip.sunny)


def structured():
    ask(instructor.Mode.JSON_SCHEMA)


def tools():
    ask(instructor.Mode.TOOLS)


def strict_tools():
    ask(instructor.Mode.TOOLS_STRICT)


def streamed(mode):
    partial = client(mode).chat.completions.create_partial(**ALWAYS, response_model=Trip)
    *_, trip = partial
    check_trip(trip.city, trip.days, trip.sunny)


def streamed_structure():
    streamed(instructor.Mode.JSON_SCHEMA)


def streamed_tools():
    streamed(instructor.Mode.TOOLS)


run(
    {
        "structured": structured,
        "streamed structure": streamed_structure,
        "tools": tools,
        "strict tools": strict_tools,
        "streamed tools": streamed_tools,
    }
)
