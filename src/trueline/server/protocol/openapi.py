"""The OpenAPI document, from the structs that read and write the bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import msgspec
from msgspec import UNSET

from trueline import __version__
from trueline.server.protocol import bodies, responses
from trueline.server.protocol.errors import ErrorResponse
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.messages_api import objects as messages
from trueline.server.protocol.messages_api.bodies import CountTokensBody, MessagesBody
from trueline.server.protocol.messages_api.content import ROLES
from trueline.server.protocol.responses_api import events, items, objects
from trueline.server.protocol.responses_api.bodies import ResponsesBody
from trueline.utils.json_types import JSON

_REQUESTS: tuple[type, ...] = (
    *(bodies.CompletionBody, bodies.ChatBody, bodies.DetokenizeBody),
    *(bodies.TokenizePromptBody, bodies.TokenizeChatBody),
    *(ResponsesBody, MessagesBody, CountTokensBody),
)
_WITHIN = (*items.KINDS.values(), *ROLES.values())
"""Of requests: what stands in their lists."""
_RESPONSES: tuple[type, ...] = (
    *(responses.Completion, responses.ChatCompletion, responses.ChatChunk),
    *(responses.ModelList, responses.ModelCard, responses.Tokenized, responses.Detokenized),
    responses.TokenizerInfo,
    *(responses.Version, responses.Health, ErrorResponse),
    *(objects.ResponseObject, *get_args(events.ResponseEvent)),
    *(messages.MessageObject, messages.CountedTokens, *get_args(messages.MessageEvent)),
)
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No API key, or one that is not known.",
    "404": "No such model.",
    "408": "The body did not come whole in time.",
    "413": "The body is too large.",
    "429": "The queue is full: come back after the seconds in Retry-After.",
    "500": "The engine failed.",
    "503": "Loading, draining, or the engine is gone.",
    "504": "Not done in time.",
}
OPEN = frozenset(
    {"/health", "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json", "/docs"}
)
"""Routes that do no work for anybody, and need no key: the server asks for one on all others."""
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")


def openapi(limits: RequestLimits, *, with_keys: bool = True) -> JSON:
    """What this server takes and gives. `with_keys`: whether it asks for an API key."""
    _, schemas = msgspec.json.schema_components(
        (*_REQUESTS, *_WITHIN, *_RESPONSES), ref_template="#/components/schemas/{name}"
    )
    for kind in _REQUESTS:
        _bound_fields(schemas[kind.__name__]["properties"], limits)
    _require_what_is_always_there(schemas)
    schemas["CompletionBody"]["properties"]["prompt"]["anyOf"] = _prompt_kinds(limits)
    _bound_ids(schemas, limits.vocab_size)
    document: JSON = {
        "openapi": "3.1.0",
        "info": {"title": "Trueline", "version": __version__},
        "paths": _paths(),
        "components": {"schemas": schemas},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path not in OPEN:
                for operation in methods.values():
                    operation["security"] = [{"key": []}]
    return document


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(description: str, schema: JSON) -> JSON:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: str) -> JSON:
    return {status: _answer(_ERRORS[status], _ref("ErrorResponse")) for status in statuses}


def _post(summary: str, takes: list[str], gives: str, stream: JSON | None = None) -> JSON:
    schemas = [_ref(name) for name in takes]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    answer = _answer("The answer.", _ref(gives))
    if stream is not None:
        answer["description"] = "The answer; where `stream` is true, server-sent events of it."
        answer["content"]["text/event-stream"] = {"schema": stream}
    errors = _errors(*_ERRORS)
    errors["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": {"200": answer, **errors}}


def _of_anthropic(operation: JSON) -> JSON:
    """With errors of that shape."""
    for status in _ERRORS:
        content = operation["responses"][status]["content"]
        content["application/json"]["schema"] = _ref("MessageError")
    return operation


def _chunks(chunk: str) -> JSON:
    """One of a stream: OpenAPI 3.1 says nothing of them, and tools take the schema for each."""
    data = {"anyOf": [{"const": "[DONE]"}, _data(chunk, "ErrorResponse")]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _named_events(names: Iterable[str]) -> JSON:
    found = {"event": {"type": "string"}, "data": _data(*names)}
    return {"type": "object", "properties": found, "required": ["event", "data"]}


def _data(*names: str) -> JSON:
    says = {"anyOf": [_ref(name) for name in names]}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": says}


def _get(summary: str, gives: str, *errors: str, **more: object) -> JSON:
    found = {"200": _answer("The answer.", _ref(gives)), **_errors(*errors)}
    return {"summary": summary, "responses": found, **more}


def _paths() -> JSON:
    metrics = {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    unwell = _answer("Not now, and why.", _ref("Health"))
    health = _get("Whether requests are served now", "Health")
    health["responses"]["503"] = unwell
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/completions": {
            "post": _post(
                "Continue prompts", ["CompletionBody"], "Completion", _chunks("Completion")
            )
        },
        "/v1/chat/completions": {
            "post": _post(
                "Answer a conversation", ["ChatBody"], "ChatCompletion", _chunks("ChatChunk")
            )
        },
        "/v1/responses": {
            "post": _post(
                "Answer a conversation, as items",
                ["ResponsesBody"],
                "ResponseObject",
                _named_events(kind.__name__ for kind in get_args(events.ResponseEvent)),
            )
        },
        "/v1/messages": {
            "post": _of_anthropic(
                _post(
                    "Answer a conversation, as Anthropic's Messages",
                    ["MessagesBody"],
                    "MessageObject",
                    _named_events(kind.__name__ for kind in get_args(messages.MessageEvent)),
                )
            )
        },
        "/v1/messages/count_tokens": {
            "post": _of_anthropic(
                _post("Tokens of such a conversation", ["CountTokensBody"], "CountedTokens")
            )
        },
        "/v1/models": {"get": _get("The models served", "ModelList", "401", "503")},
        "/v1/models/{model}": {
            "get": _get("One model", "ModelCard", "401", "404", "503", parameters=[name])
        },
        "/tokenize": {
            "post": _post(
                "Tokens of a text or of messages",
                ["TokenizePromptBody", "TokenizeChatBody"],
                "Tokenized",
            )
        },
        "/detokenize": {"post": _post("Text of tokens", ["DetokenizeBody"], "Detokenized")},
        "/tokenizer_info": {
            "get": _get(
                "Special tokens and template of the tokenizer", "TokenizerInfo", "401", "503"
            )
        },
        "/version": {"get": _get("The version of Trueline", "Version")},
        "/health": {"get": health},
        "/health/ready": {"get": health},
        "/health/live": {"get": _get("Whether the process answers at all", "Health")},
        "/metrics": {"get": {"summary": "Prometheus metrics", "responses": {"200": metrics}}},
    }


def _bound_fields(fields: JSON, limits: RequestLimits) -> None:
    """What these limits add to the bounds of the structs."""
    fields["model"]["anyOf"][0]["enum"] = list(limits.models)
    for name in _LOGPROBS:
        number = fields.get(name, {}).get("anyOf", [{}])[0]
        if number.get("type") == "integer" and limits.max_logprobs != -1:
            number.update(minimum=0, maximum=min(limits.max_logprobs, limits.vocab_size))
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if name in fields:
            (number,) = fields[name].get("anyOf", [fields[name]])[:1]
            number["maximum"] = limits.max_model_len - 1
    if "n" in fields:
        number = fields["n"]["anyOf"][0]
        number["maximum"] = min(number["maximum"], limits.max_sequences)
    if "chat_template" in fields and not limits.request_templates:
        fields["chat_template"] = {"description": "null", "type": "null"}


def _prompt_kinds(limits: RequestLimits) -> list[JSON]:
    """msgspec has one kind of list in a union; these are the lists that are taken."""
    text = {"type": "string"}
    ids = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "title": bodies.TOKEN_ID},
        "minItems": 1,
    }
    many = {"type": "array", "minItems": 1, "maxItems": limits.max_sequences}
    return [text, *({**many, "items": kind} for kind in (text, ids)), ids]


def _bound_ids(schema: object, vocab_size: int) -> None:
    if isinstance(schema, dict):
        if schema.get("title") == bodies.TOKEN_ID:
            schema["maximum"] = vocab_size - 1
        for part in schema.values():
            _bound_ids(part, vocab_size)
    elif isinstance(schema, list):
        for part in schema:
            _bound_ids(part, vocab_size)


def _require_what_is_always_there(schemas: JSON) -> None:
    """To msgspec a field with a default may be missing; in an answer only UNSET is."""
    for module in (responses, objects, events, messages):
        for kind in vars(module).values():
            if getattr(kind, "__module__", None) != module.__name__:
                continue
            if isinstance(kind, type) and kind.__name__ in schemas:
                tag = kind.__struct_config__.tag_field  # type: ignore[attr-defined]
                schemas[kind.__name__]["required"] = [
                    *([tag] if tag else []),
                    *(f.name for f in msgspec.structs.fields(kind) if f.default is not UNSET),
                ]
