"""The server against its own OpenAPI document: what the document allows is taken, what it does not
allow is refused, and every answer looks as it says. schemathesis makes the requests."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from answered import named_events
from servers import Served, serving
from wire import events

Tiny = Callable[..., Path]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = {
    "POST": ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
             "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    "GET": ("/v1/models", "/v1/models/{model}", "/version", "/health", "/health/ready",
            "/health/live", "/metrics", "/tokenizer_info"),
}  # fmt: skip
EXPLORED = tuple(path for path in OPERATIONS["POST"] if path != "/v1/messages/count_tokens")
"""schemathesis 4.32 cannot always draw what that one's body must not be ("Cannot generate an array
with 1 demanded elements"); its fields are those of /v1/messages."""
NAMED = {
    "/v1/responses": {f"response.{end}" for end in ("completed", "incomplete", "failed")},
    "/v1/messages": {"message_stop", "error"},
}
"""Streams whose events have names, and how they end."""
RULES = {
    r"(prompt|messages|input)(\[\d+\])?: (at least )?\d+ tokens; accepted: up to 47": "in tokens",
    r"prompt(\[\d+\])?: the prompt is empty": "some put a token before it",
    r"(messages|input): the template makes an empty prompt": "others do not",
    r"chat template (refuses these messages|failed)": "every template has rules of its own",
    r"model '.*' is not served here": "in a path, where it is any text",
    r"logit_bias has token \d+": "names of fields have no bounds",
    r"n = \d+ with temperature = [0-9.e-]+: greedy": "two fields",
    r"\d+ prompts × n = \d+": "two fields",
    r"best_of = ": "two fields",
    r"min_tokens = ": "two fields",
    r"top_logprobs: accepted: where logprobs is true": "two fields",
    r"stream_options: accepted: where stream is true": "two fields",
    r"max_completion_tokens = \d+: max_tokens": "two fields",
    r"(max_(completion_|output_)?tokens|min_tokens) = \d+: the prompt has": "in tokens",
    r"\w+: accepted: without \w+, which says it too": "two fields",
    r"no token is left that ": "several fields, and what the model draws",
    r"continue_final_message": "two fields, and what the template shows",
    r"(guided_grammar|structured_outputs\.grammar)": "a grammar, which has a syntax",
    r"(guided_regex|structured_outputs\.(regex|whitespace_pattern))": "likewise",
    r"(guided_json|structured_outputs\.json|response_format\.json_schema\.schema"
    r"|text\.format\.schema)": "a schema",
    r"chat_template_kwargs\.\w+: accepted: as a field": "a name of another field",
    r"(chat_template_kwargs\.)?reasoning(_|\.)effort = ": "the template's",
    r"chat_template_kwargs\.\w+: this model's chat template has no switch": "likewise",
    r"thinking_token_budget = \d+: thinking_budget": "two fields",
    r"tools: (this model's chat template shows none|how this model writes)": "the template's",
    r"messages: (accepted: messages that say|the last one has a tool_use)": "several fields",
    r"messages\[\d+\]\.content\[\d+\]\.(tool_use_)?id = ": "two blocks",
    r"thinking\.(type|budget_tokens)": "the template's",
    r"output_config\.(effort = |format)": "the template's, a schema, and two fields",
    r"tools\[\d+\](\.function)?\.name = .*: another tool has it": "two tools",
    r"tool_choice(: accepted: with tools|(\.name)? = .*: no tool has this name)": "two fields",
    r"messages\[\d+\]\.tool_calls": "a message's fields are its template's",
    r"top_logprobs: accepted: where include has": "two fields",
    r"text\.format: accepted: without tools": "two fields",
    r"input\[\d+\]\.(call_id|arguments) = ": "two items, and a text of JSON",
    r"input: accepted: items that say something": "several fields",
}
"""What the document cannot say, by how the refusal begins, and why it cannot."""


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Served]:
    """Its limits keep every request short."""
    flags = ("--max-model-len", "48", "--max-sequences", "64", "--served-model-name", "tiny")
    with serving(tiny("deepseek_v3"), *flags) as served:
        yield served
        assert served.metric("trueline:num_requests_running") == 0
        assert served.metric("trueline:kv_cache_usage_perc") == 0
        assert "Traceback" not in "".join(served.log)


@pytest.fixture(scope="module")
def schema(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def check(server: Served, case: Any, session: requests.Session) -> int:
    """The status, which is in order."""
    if case.meta.generation.mode is GenerationMode.POSITIVE:
        _suit_template(case.body)
    for _ in range(200):
        response = case.call(base_url=server.url, session=session)
        if response.status_code != 429:  # streams that nobody reads any more are still running
            break
        time.sleep(0.05)
    case.validate_response(response, checks=CHECKS)
    mode = case.meta.generation.mode
    if mode is GenerationMode.POSITIVE and response.status_code != 200:
        told = response.json()["error"]["message"]
        assert any(re.match(rule, told) for rule in RULES), told
    streams = response.headers["content-type"][0].startswith("text/event-stream")
    if streams and not response.stream_cut_short:  # it stops reading after some dozens
        if case.path in NAMED:
            assert named_events(response.content)[-1][0] in NAMED[case.path]
        else:
            assert events(response.content)[-1] is None
    return response.status_code


def _suit_template(body: Any) -> None:
    """To the document a role is any text and content is optional; not so to a template."""
    for message in body.get("messages") or [] if isinstance(body, dict) else []:
        message["content"] = message.get("content") or "text"
        if message.get("role") not in ("system", "user", "assistant"):
            message["role"] = "user"


def explore(server: Served, schema: Any, method: str, path: str, examples: int) -> None:
    operation, session = schema[path][method], requests.Session()
    found: Counter[int] = Counter()

    def draw(mode: GenerationMode, number: int) -> None:
        @seed(number)
        @settings(max_examples=examples // 2, deadline=None, database=None, derandomize=False,
                  verbosity=Verbosity.quiet, phases=[Phase.generate, Phase.shrink],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            found[check(server, case, session)] += 1

        each()

    # What is drawn is not the same in every run: until enough were taken, so
    # that we were not all the time at the door.
    for number in range(7, 27):
        draw(GenerationMode.POSITIVE, number)
        if method == "GET" or found[200] > examples / 10:
            break
    if method == "POST":
        draw(GenerationMode.NEGATIVE, 7)
        assert found[200] > examples / 10, found
        assert found[400] > examples / 10, found


def test_the_document_has_all_routes(schema: Any) -> None:
    found = {(op.method.upper(), op.path) for op in (r.ok() for r in schema.get_all_operations())}
    assert found == {(method, path) for method, paths in OPERATIONS.items() for path in paths}


@pytest.mark.parametrize("path", EXPLORED)
def test_bodies(server: Served, schema: Any, path: str) -> None:
    explore(server, schema, "POST", path, 30)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPLORED)
def test_many_bodies(server: Served, schema: Any, path: str) -> None:
    explore(server, schema, "POST", path, 800)


@pytest.mark.parametrize("path", OPERATIONS["GET"])
def test_pages(server: Served, schema: Any, path: str) -> None:
    explore(server, schema, "GET", path, 10)
