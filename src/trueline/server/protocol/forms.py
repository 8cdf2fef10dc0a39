"""What form an answer is asked to have: OpenAI's `response_format`, vLLM's `structured_outputs`,
and the names these had before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from trueline.errors import UsageError
from trueline.grammar.compiled import MAX_BYTES, MAX_CHOICES
from trueline.grammar.structured import KINDS, StructuredOutputsParams
from trueline.server.protocol.errors import ApiError, bad_request
from trueline.utils.json_types import JSON

Text = Annotated[str, Meta(min_length=1, max_length=MAX_BYTES)]
Schema: TypeAlias = JSON | bool | Text
MAX_CHOICE_CHARS = 1024
Choice = Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_CHARS)]
Choices = Annotated[list[Choice], Meta(min_length=1, max_length=MAX_CHOICES)]


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text",
                 forbid_unknown_fields=True):  # fmt: skip
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object",
                       forbid_unknown_fields=True):  # fmt: skip
    pass


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: Annotated[JSON, Meta(description="a JSON schema")]
    description: str | None = None
    strict: bool | None = None
    """The answer has the form whatever this says."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema",
                       forbid_unknown_fields=True):  # fmt: skip
    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Text | None = None


def _given(name: str) -> JSON:
    there = {"const": True} if name == "json_object" else {"not": {"type": "null"}}
    return {"required": [name], "properties": {name: there}}


_ONE_KIND = {
    "anyOf": [
        {"type": "null"},
        {
            "oneOf": [_given(name) for name in KINDS],
            "not": {
                "required": ["disable_any_whitespace", "whitespace_pattern"],
                "properties": {
                    "disable_any_whitespace": {"const": True},
                    "whitespace_pattern": {"type": "string"},
                },
            },
        },
    ]
}
"""What the struct cannot say."""


class Forms(msgspec.Struct):
    """Fields of a body; one of them at most."""

    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
        Meta(
            description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
            '"json_schema": {"name": ..., "schema": {...}}}'
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(
            description=f"an object with exactly one of {', '.join(KINDS)}",
            extra_json_schema={"allOf": [_ONE_KIND]},
        ),
    ] = None
    guided_json: Annotated[
        Schema | None,
        Meta(description=f"a JSON schema, or its text of up to {MAX_BYTES} characters"),
    ] = None
    guided_regex: Annotated[
        Text | None, Meta(description=f"a regular expression of 1 to {MAX_BYTES} characters")
    ] = None
    guided_choice: Annotated[
        Choices | None,
        Meta(
            description=f"a list of 1 to {MAX_CHOICES} texts of 1 to {MAX_CHOICE_CHARS} characters"
        ),
    ] = None
    guided_grammar: Annotated[
        Text | None, Meta(description=f"a grammar in Lark or GBNF of 1 to {MAX_BYTES} characters")
    ] = None


class FormFields(Protocol):
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: JSON | bool | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


class AskedForm(msgspec.Struct, frozen=True):
    field: str
    params: StructuredOutputsParams
    names: Mapping[str, str]
    """What errors call its fields: as the request does."""


FREE = tuple(Forms.__struct_fields__)
"""What is not ours to change: schemas."""


def read_form(fields: FormFields) -> AskedForm | None:
    """What the answer must be like; None: free text."""
    given = {name: value for name in FREE if (value := getattr(fields, name)) is not None}
    if isinstance(fields.response_format, TextFormat):
        del given["response_format"]
    if len(given) > 1:
        first, second, *_ = given
        raise bad_request(f"{second}: accepted: without {first}, which says it too", second)
    if not given:
        return None
    ((name, value),) = given.items()
    asked, names = _asked(name, value)
    try:
        return AskedForm(name, StructuredOutputsParams(**asked), names)
    except UsageError as error:
        raise bad_request(str(error), name) from None


def _asked(name: str, value: object) -> tuple[dict[str, Any], dict[str, str]]:
    """As fields of StructuredOutputsParams, and what they are called here."""
    match value:
        case JsonObjectFormat():
            return {"json_object": True}, {"json_object": name}
        case JsonSchemaFormat(json_schema):
            return {"json": json_schema.schema}, {"json": f"{name}.json_schema.schema"}
        case StructuredOutputs():
            found = msgspec.structs.asdict(value)
            return {key: each for key, each in found.items() if each is not None}, {}
        case _:
            kind = name.removeprefix("guided_")
            return {kind: value}, {kind: name}


def not_honoured(error: UsageError) -> ApiError:
    """A form that cannot be compiled: errors begin with the place."""
    place = str(error).partition(": ")[0].partition(" = ")[0]
    return bad_request(str(error), place)
