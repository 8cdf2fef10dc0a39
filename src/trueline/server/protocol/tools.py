"""What a request offers its model to call, read into plain data: `tools`, `tool_choice` and
`parallel_tool_calls`. Other endpoints say the same in shapes of their own, and make the same
`ToolsAsked` of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from trueline.errors import short, short_repr
from trueline.server.protocol.errors import bad_request
from trueline.server.protocol.limits import MAX_ITEMS, MAX_TOOLS_BYTES
from trueline.text.formats.values import Functions
from trueline.utils.json_types import JSON

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAME_IN_WORDS = "1 to 64 letters, digits, underscores and hyphens"
_NAME_PATTERN = {"pattern": r"^[a-zA-Z0-9_-]{1,64}$", "maxLength": 64}
Name = Annotated[str, Meta(extra_json_schema=_NAME_PATTERN)]


class FunctionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: Annotated[JSON | None, Meta(description="a JSON schema")] = None
    strict: bool | None = None


class ToolFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionFields


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name


class NamedChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[
    Annotated[list[ToolFields], Meta(max_length=MAX_ITEMS["tools"])] | None,
    Meta(
        description=f"a list of up to {MAX_ITEMS['tools']} tools, as "
        '{"type": "function", "function": {"name": "get_weather", "parameters": {...}}}'
    ),
]
Choice: TypeAlias = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Choice | NamedChoice | None,
    Meta(
        description='"none", "auto", "required" or '
        '{"type": "function", "function": {"name": ...}}, of tools'
    ),
]


class ToolsBody(msgspec.Struct):
    """A body's tools as they were written: their fields in their order, as templates show them."""

    tools: list[JSON] | None = None


class OfferedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    parameters: JSON
    """The JSON schema of its arguments."""
    strict: bool
    """Whether its arguments are held to the schema whenever it is called."""
    shown: JSON
    """The tool as a template gets it: in the form of OpenAI's chats."""
    where: str
    """The schema's place in the request: errors begin with it."""


class ToolsAsked(msgspec.Struct, frozen=True, kw_only=True):
    functions: tuple[OfferedFunction, ...]
    """With names of their own, one at least."""
    choice: Choice
    """required: the answer is calls, at least one."""
    parallel: bool = True
    """False: one call at most."""
    named: str | None = None
    """With `required`: the only function that may be called."""

    @property
    def shown(self) -> list[JSON] | None:
        """What the template gets: nothing where nothing may be called."""
        return [each.shown for each in self.functions] if self.choice != "none" else None

    @property
    def callable(self) -> tuple[OfferedFunction, ...]:
        """Those that the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(each for each in self.functions if self.named in (None, each.name))

    @property
    def schemas(self) -> Functions | None:
        """To read an answer by; None where it has no calls."""
        found = {each.name: each.parameters for each in self.callable}
        return Functions(found) if found else None


class ToolChoiceFields(Protocol):
    @property
    def tools(self) -> Sequence[ToolFields] | None: ...
    @property
    def tool_choice(self) -> Choice | NamedChoice | None: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


def read_tools(fields: ToolChoiceFields, body: bytes) -> ToolsAsked | None:
    """None where no tools are offered. `body` is what `fields` were read from."""
    offered = []
    if fields.tools:
        written = msgspec.json.decode(body, type=ToolsBody).tools
        assert written is not None
        offered = [
            offered_function(f"tools[{i}].function", tool.function, raw["function"])
            for i, (tool, raw) in enumerate(zip(fields.tools, written, strict=True))
        ]
    choice = fields.tool_choice
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    return tools_asked(
        offered,
        "required" if isinstance(choice, NamedChoice) else choice or "auto",
        parallel=fields.parallel_tool_calls is not False,
        named=named,
    )


class FunctionSaid(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> JSON | None: ...
    @property
    def strict(self) -> bool | None: ...


def offered_function(
    where: str, fields: FunctionSaid, written: JSON, schema_field: str = "parameters"
) -> OfferedFunction:
    """`written`: the function as the client wrote it. One without parameters takes none."""
    if not NAME.fullmatch(fields.name):
        raise bad_request(
            f"{where}.name = {short_repr(fields.name)}: accepted: {NAME_IN_WORDS}", f"{where}.name"
        )
    said = {name: value for name, value in written.items() if value is not None}
    parameters = fields.parameters or {"type": "object", "properties": {}}
    return OfferedFunction(
        name=fields.name,
        parameters=parameters,
        strict=bool(fields.strict),
        shown={"type": "function", "function": {**said, "parameters": parameters}},
        where=f"{where}.{schema_field}",
    )


def tools_asked(
    offered: Sequence[OfferedFunction],
    choice: Choice,
    *,
    parallel: bool,
    named: str | None = None,
    choice_field: str = "tool_choice",
) -> ToolsAsked | None:
    """Checks what concerns several of them; None where there are none."""
    if not offered:
        if choice == "required":
            raise bad_request("tool_choice: accepted: with tools to choose from", "tool_choice")
        return None
    names: set[str] = set()
    for each in offered:
        if each.name in names:
            raise bad_request(
                f"{each.where.rpartition('.')[0]}.name = {short_repr(each.name)}: another "
                "tool has it; accepted: a name of its own",
                "tools",
            )
        names.add(each.name)
    size = sum(len(msgspec.json.encode(each.shown)) for each in offered)
    if size > MAX_TOOLS_BYTES:
        raise bad_request(f"tools: {size} bytes; accepted: up to {MAX_TOOLS_BYTES}", "tools")
    if named is not None and named not in names:
        raise bad_request(
            f"{choice_field} = {short_repr(named)}: no tool has this name; accepted: "
            f"{short(', '.join(sorted(names)), 300)}",
            choice_field,
        )
    return ToolsAsked(functions=tuple(offered), choice=choice, parallel=parallel, named=named)
