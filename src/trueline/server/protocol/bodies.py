"""The JSON bodies of requests. Decoding and the OpenAPI schemas both come from these structs.

Null means absent. The description of a field says what is accepted: in the schema and in errors.
What SamplingParams knows is taken from there, bounds and words.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

from trueline.engine.params import INT64, MAX_BIAS, REALS, WHOLES, SamplingParams
from trueline.server.protocol.forms import Forms
from trueline.server.protocol.limits import MAX_CHARS, MAX_ITEMS
from trueline.server.protocol.tools import ToolChoice, Tools
from trueline.utils.json_types import JSON, JsonValue

TOKEN_ID = "TokenId"
"""The title by which the OpenAPI document finds token ids, to bound them by the vocabulary."""
TokenId = Annotated[int, Meta(ge=0, extra_json_schema={"title": TOKEN_ID})]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = [
    {"type": "string"},
    {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}},
]
# Templates read what they like of a message, so its other fields are free.
_MESSAGE = {
    "anyOf": [
        {
            "properties": {
                "role": {"type": "string", "minLength": 1},
                "content": {"anyOf": _CONTENT},
            },
            "required": ["role", "content"],
        },
        {
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
            },
            "required": ["role"],
        },
    ]
}
Flag = Annotated[bool | None, Meta(description="true or false")]
Messages = Annotated[
    list[Annotated[JSON, Meta(extra_json_schema=_MESSAGE)]],
    Meta(
        min_length=1,
        max_length=MAX_ITEMS["messages"],
        description=f"a list of at least one message and up to {MAX_ITEMS['messages']}, as "
        '{"role": "user", "content": "hello"}',
    ),
]
Int64 = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]


def _ids(field: str, low: int, words: str) -> object:
    ids = Annotated[list[TokenId], Meta(min_length=low, max_length=MAX_ITEMS[field])]
    return Annotated[ids | None, Meta(description=words.format(MAX_ITEMS[field]))]


def _real(low: float, high: float, accepted: str) -> object:
    bounds: dict[str, float] = {"gt": 0} if low == math.ulp(0.0) else {"ge": low}
    if math.isfinite(high):
        bounds["le"] = high
    number = Annotated[float, Meta(**bounds)]
    return Annotated[number | None, Meta(description=accepted)]


def _whole(low: int, high: int, accepted: str) -> object:
    number = Annotated[int, Meta(ge=low, le=high)]
    words = accepted.replace("None", "null")
    return Annotated[number | None, Meta(description=words)]


_REALS = {name: _real(low, high, words) for name, low, high, words in REALS}
_WHOLES = {name: _whole(low, high, words) for name, low, high, _, words in WHOLES}
_Stop = Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["stop"])]
_BadWord = Annotated[str, Meta(pattern=r"\S", max_length=MAX_CHARS["bad_words"])]
_Bias = dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]]
_OTHERS: dict[str, object] = {
    "stop": Annotated[
        _Stop | Annotated[list[_Stop], Meta(max_length=MAX_ITEMS["stop"])] | None,
        Meta(
            description=f"a text or a list of up to {MAX_ITEMS['stop']} texts that are not empty, "
            f"of up to {MAX_CHARS['stop']} characters each"
        ),
    ],
    "stop_token_ids": _ids("stop_token_ids", 0, "a list of token ids, up to {}"),
    "allowed_token_ids": _ids(
        "allowed_token_ids", 1, "a list of at least one token id and up to {}, or null for all"
    ),
    "bad_words": Annotated[
        Annotated[list[_BadWord], Meta(max_length=MAX_ITEMS["bad_words"])] | None,
        Meta(
            description=f"a list of up to {MAX_ITEMS['bad_words']} words of more than white space, "
            f"none longer than {MAX_CHARS['bad_words']} characters"
        ),
    ],
    "logit_bias": Annotated[
        Annotated[_Bias, Meta(max_length=MAX_ITEMS["logit_bias"])] | None,
        Meta(
            description=f"up to {MAX_ITEMS['logit_bias']} token ids and numbers from -{MAX_BIAS:g} "
            f'to {MAX_BIAS:g}, as {{"42": -1.5}}; bad_words forbids altogether',
            extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,17})$"}},
        ),
    ],
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), Flag),
}
KINDS = _REALS | _WHOLES | _OTHERS
"""By field of SamplingParams, what a body takes."""
SAMPLING = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in Forms.__struct_fields__
)
"""Fields that go to SamplingParams as they are, but for what a body says itself."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    not_offered: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted only where the answer is the same without them."""
    model: Annotated[
        Annotated[str, Meta(max_length=MAX_CHARS["model"])] | None,
        Meta(description=f"a text of up to {MAX_CHARS['model']} characters"),
    ] = None


class Ignored(msgspec.Struct):
    """Fields that cannot change the answer: the whole list."""

    user: JsonValue = None
    metadata: JsonValue = None
    store: JsonValue = None
    service_tier: JsonValue = None
    safety_identifier: JsonValue = None
    prompt_cache_key: JsonValue = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: JsonValue = None


Null = Annotated[None, Meta(description="null")]
NoTools = Annotated[
    Annotated[list[JsonValue], Meta(max_length=0)] | None, Meta(description="null or an empty list")
]
NoChoice = Annotated[Literal["none", "auto"] | None, Meta(description='null, "none" or "auto"')]


class NotOffered(msgspec.Struct):
    """Fields of OpenAI's, then of vLLM's, that are not offered yet: accepted where the answer is
    the same without them. Some SDKs send every field they know, as null or as its default. Chats
    have tools, and their own fields for them."""

    tools: NoTools = None
    tool_choice: NoChoice = None
    functions: NoTools = None
    function_call: NoChoice = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="true or false, which is the same without tools")
    ] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] | None,
        Meta(description='null or ["text"]'),
    ] = None
    verbosity: Annotated[
        Literal["medium"] | None, Meta(description='null or "medium", the default')
    ] = None
    audio: Null = None
    moderation: Null = None
    prediction: Null = None
    web_search_options: Null = None
    suffix: Null = None
    logits_processors: Null = None
    use_beam_search: Annotated[Literal[False] | None, Meta(description="null or false")] = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Generating(msgspec.Struct):
    """What both kinds of generation take besides SamplingParams."""

    stream: Flag = None
    stream_options: Annotated[
        StreamOptions | None,
        Meta(description='an object as {"include_usage": true}, where stream is true'),
    ] = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64 - 1, extra_json_schema={"not": {"const": 0}})] | None,
        Meta(
            description="a whole number from 1 up, or -1 for as many as leave room for max_tokens"
        ),
    ] = None
    priority: Annotated[
        Int64 | None, Meta(description="a whole number of 64 bits; lower ones go first")
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["cache_salt"])] | None,
        Meta(
            description=f"a text that is not empty, of up to {MAX_CHARS['cache_salt']} characters"
        ),
    ] = None


class CompletionFields(Body, frozen=True, kw_only=True):
    not_offered: ClassVar[frozenset[str]] = frozenset(NotOffered.__struct_fields__)
    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="a text, a list of token ids, or a list of either, none of them empty"),
    ]
    echo: Flag = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=INT64 - 1)] | None,
        Meta(description="a whole number; 0 for scores of the prompt alone"),
    ] = None
    best_of: Annotated[int | None, Meta(description="what n is, or null")] = None


Budget = Annotated[
    Annotated[int, Meta(ge=0, le=INT64 - 1)] | None,
    Meta(description="a whole number of tokens from 0 up, after which the reasoning is ended"),
]


TemplateArguments = Annotated[
    Annotated[JSON, Meta(max_length=MAX_ITEMS["chat_template_kwargs"])] | None,
    Meta(
        description="an object: the template's own arguments, up to "
        f"{MAX_ITEMS['chat_template_kwargs']}"
    ),
]


class Templating(Body, frozen=True, kw_only=True):
    """How messages become a prompt."""

    messages: Messages
    chat_template: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["chat_template"])] | None,
        Meta(
            description="a text that is not empty, of up to "
            f"{MAX_CHARS['chat_template']} characters"
        ),
    ] = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    reasoning_effort: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_CHARS["reasoning_effort"])] | None,
        Meta(
            description="a level that the model's chat template knows, or none: up to "
            f"{MAX_CHARS['reasoning_effort']} characters"
        ),
    ] = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag = None


class ChatFields(Templating, frozen=True, kw_only=True):
    not_offered: ClassVar[frozenset[str]] = CompletionFields.not_offered.difference(
        Templating.__struct_fields__
    )
    logprobs: Flag = None
    include_reasoning: Flag = None
    thinking_token_budget: Budget = None
    thinking_budget: Budget = None


class GenerationFields(Protocol):
    """Of what `_generating` adds to a body, the fields that are read by name."""

    stream: bool | None
    stream_options: StreamOptions | None
    return_token_ids: bool | None
    return_tokens_as_token_ids: bool | None
    truncate_prompt_tokens: int | None
    priority: int | None
    cache_salt: str | None
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    """Of a chat, true or false: `ChatFields`."""
    prompt_logprobs: int | None


class ChatGenerationFields(GenerationFields, Protocol):
    top_logprobs: int | None
    max_completion_tokens: int | None


B = TypeVar("B", bound=Body)


def types_of(*parts: type[msgspec.Struct]) -> dict[str, object]:
    return {field.name: field.type for part in parts for field in msgspec.structs.fields(part)}


def _generating(name: str, own: type[B], more: dict[str, object]) -> type[B]:
    """The fields of `own`, and all that generation takes."""
    shared = types_of(Generating, Forms, Ignored, NotOffered)
    return body_with(name, own, shared | more | {field: KINDS[field] for field in SAMPLING})


def body_with(name: str, own: type[B], fields: dict[str, object]) -> type[B]:
    """The fields of `own`, and these, which default to null."""
    made = msgspec.defstruct(
        name,
        [
            (field, kind, None)
            for field, kind in fields.items()
            if field not in own.__struct_fields__
        ],
        bases=(own,),
        frozen=True,
        kw_only=True,
    )
    return cast("type[B]", made)


CompletionBody = _generating("CompletionBody", CompletionFields, {})
ChatBody = _generating(
    "ChatBody",
    ChatFields,
    {"top_logprobs": KINDS["logprobs"], "max_completion_tokens": KINDS["max_tokens"]},
)


class TokenizeBody(msgspec.Struct):
    """To see which of the two kinds it is."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class TokenizePromptBody(Body, frozen=True, kw_only=True):
    prompt: Annotated[str, Meta(description="a text")]
    add_special_tokens: Flag = None
    return_token_strs: Flag = None


class TokenizeChatBody(Templating, frozen=True, kw_only=True):
    add_special_tokens: Flag = None
    return_token_strs: Flag = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(description="a list of token ids")]


FIELDS = frozenset(
    field
    for body in (CompletionBody, ChatBody, TokenizePromptBody, TokenizeChatBody, DetokenizeBody)
    for field in body.__struct_fields__
)
"""The names of all of them."""
