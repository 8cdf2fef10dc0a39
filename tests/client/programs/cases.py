"""What the programs here share. Each is run by ../test_other_clients.py in an environment of its
own, uses one client as its documentation says, and tells how each case went."""

import json
import sys
import traceback

ASKED = json.loads(sys.argv[1])
"""url, model, and what the server says to plain HTTP: text, reasoning, after."""
PROMPT = "hi"
TOKENS = 12
THINKING = {
    "chat_template_kwargs": {"enable_thinking": True},
    "thinking_token_budget": 8,
}
DRAWN = {"temperature": 1.0, "seed": 1}
"""Of what a grammar holds: the likeliest token of a random model may be white space for ever."""
CITIES = ("Rome", "Oslo")
DESCRIPTION = "The weather in a city"


def check_trip(city, days, sunny):
    assert city in CITIES, city
    assert type(days) is int
    assert 1 <= days <= 9, days
    assert type(sunny) is bool


def check_weather(arguments):
    """There may be others where a client leaves out that there may not."""
    check_trip(arguments["city"], arguments["days"], True)


def run(cases):
    outcomes = {}
    for name, case in cases.items():
        try:
            case()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
    print("OUTCOMES " + json.dumps(outcomes))
