"""Parsers of chat formats: the same for every way of cutting an answer, and what was meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chat_answers import (
    A_CALL,
    CUTS,
    FUNCTIONS,
    PLAIN,
    SYNTAXES,
    TEXTS,
    Call,
    answers,
    calls_of,
    chat_format,
    check_calls,
    cut,
    markers,
    parse,
    write_calls,
)
from trueline.errors import UsageError
from trueline.text.formats.choose import CALLS, find_format
from trueline.text.formats.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Malformed,
    Reasoning,
)
from trueline.text.formats.json_text import JsonText
from trueline.text.formats.values import NOT_JSON, Functions, read_json, types_of

NAMES = sorted(CALLS)
HI = Call("get_weather", {"text": "Zürich <b>", "number": 5, "list": [1, {"a": "}"}]})


def check_any_cut(data: st.DataObject) -> None:
    syntax = data.draw(SYNTAXES)
    form = chat_format(syntax)
    as_tokens = data.draw(st.booleans())
    text = markers(form, as_tokens=as_tokens).seen(data.draw(answers(syntax)))
    mode = {"as_tokens": as_tokens, "thinking": data.draw(st.booleans())}
    whole = parse(form, [text], **mode)
    check_calls(whole)
    assert parse(form, list(text), **mode) == whole
    assert parse(form, cut(text, data.draw(CUTS)), **mode) == whole


@settings(max_examples=30)
@given(data=st.data())
def test_any_cut_gives_what_the_whole_gives(data: st.DataObject) -> None:
    check_any_cut(data)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(data=st.data())
def test_any_cut_of_many_answers(data: st.DataObject) -> None:
    check_any_cut(data)


@pytest.mark.parametrize("syntax", NAMES)
def test_every_cut_in_two(syntax: str) -> None:
    form = chat_format(syntax)
    for as_tokens in (False, True):
        text = f"so</think>\n\nHello.\n\n{write_calls(syntax, [HI, Call('now', {})])}"
        text = markers(form, as_tokens=as_tokens).seen(text)
        whole = parse(form, [text], as_tokens=as_tokens, thinking=True)
        assert [type(event) for event in whole] == [
            *(Reasoning, Content, CallStart, Arguments, CallEnd, CallStart, Arguments, CallEnd)
        ]
        assert whole[:2] == [Reasoning("so"), Content("Hello.")]
        for place in range(1, len(text), 1 if as_tokens else 3):
            pieces = [text[:place], text[place:]]
            assert parse(form, pieces, as_tokens=as_tokens, thinking=True) == whole, place


@pytest.mark.parametrize("syntax", NAMES)
def test_a_call_that_breaks_off_is_told_as_text(syntax: str) -> None:
    """Cut off anywhere: nothing is made up (`{}`), nothing is lost."""
    form, call = chat_format(syntax), write_calls(syntax, [HI])
    text = f"Hello. {call}"
    for end in range(1, len(text)):
        events = parse(form, [text[:end]])
        check_calls(events)
        made = list(calls_of(events))
        assert made in ([], [HI])
        if made:
            assert text[end:] in endings(text), end
        told = [event for event in events if isinstance(event, Malformed)]
        shown = "".join(e.text for e in events if isinstance(e, Content | Malformed))
        assert made or told or shown.strip() or not text[:end].strip()
        if told:
            assert text[:end].rstrip().endswith(told[-1].text.rstrip())
            assert "ended within the call" in told[-1].reason


def endings(text: str) -> list[str]:
    """The section's own end may be missing, or a part of it: the call itself is whole."""
    return [text[i:] for i in range(len(text) - 30, len(text))]


def check_round_trip(data: st.DataObject) -> None:
    """What is meant comes back, whatever values spell; where marks are no tokens, values that
    spell none."""
    syntax = data.draw(SYNTAXES)
    form, as_tokens = chat_format(syntax), data.draw(st.booleans())
    mark = markers(form, as_tokens=as_tokens).seen
    calls = data.draw(st.lists(A_CALL, max_size=3))
    values = json.dumps([call.arguments for call in calls], ensure_ascii=False)
    assume(as_tokens or not any(begin in values for begin in ("<", "```", '">')))
    told = data.draw(st.none() | PLAIN.map(str.strip))
    content = data.draw(PLAIN).strip()
    head = "" if told is None else f"{told}{mark('</think>')}"
    text = head + content + data.draw(st.sampled_from(("", "\n\n")))
    text += write_calls(syntax, calls, mark) if calls else ""
    mode = {"as_tokens": as_tokens, "thinking": told is not None}
    events = parse(form, cut(text, data.draw(CUTS)), **mode)
    assert list(calls_of(events)) == calls
    assert "".join(e.text for e in events if isinstance(e, Content)).strip() == content
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == (told or "")
    assert not any(isinstance(event, Malformed) for event in events)


@settings(max_examples=30)
@given(data=st.data())
def test_calls_come_back_as_they_were_meant(data: st.DataObject) -> None:
    check_round_trip(data)


@pytest.mark.slow
@settings(max_examples=20_000)
@given(data=st.data())
def test_many_calls_come_back(data: st.DataObject) -> None:
    check_round_trip(data)


def told(syntax: str, text: str, **mode: object) -> list[object]:
    """What an answer in one piece says, calls as one thing."""
    found: list[object] = []
    events = parse(chat_format(syntax), [text], **mode)  # type: ignore[arg-type]
    calls = calls_of(events)
    for event in events:
        if isinstance(event, Reasoning | Content | Malformed):
            found.append(event)
        elif isinstance(event, CallEnd):
            found.append(next(calls))
    return found


NOW = Call("now", {})


@pytest.mark.parametrize("syntax", NAMES)
def test_text_beside_calls_stays(syntax: str) -> None:
    """Before a section, behind it, and between two of them."""
    form, call = chat_format(syntax), write_calls(syntax, [NOW])
    for as_tokens in (False, True):
        mark = markers(form, as_tokens=as_tokens).seen
        text = f"a {mark(call)} b {mark(call)}c"
        wanted = [Content("a"), NOW, Content("  b"), NOW, Content(" c")]
        assert told(syntax, text, as_tokens=as_tokens) == wanted
    assert form.calls is not None
    if len(form.calls.opens) > 1:  # a section with nothing in it
        opened = form.calls.opens[0]
        closed = {"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"}.get(
            opened, opened.replace("begin", "end").replace("<｜D", "</｜D")
        )
        assert told(syntax, f"a {opened}\n{closed} b") == [Content("a  b")]


@pytest.mark.parametrize("syntax", NAMES)
def test_spelled_marks_are_text_where_the_marks_are_tokens(syntax: str) -> None:
    text = f"<think>no</think> {write_calls(syntax, [NOW])}"
    assert told(syntax, text, as_tokens=True) == [Content(text)]


@pytest.mark.parametrize("syntax", NAMES)
def test_calls_within_reasoning(syntax: str) -> None:
    """They do not fire; but Kimi's end the reasoning, and are meant."""
    call = write_calls(syntax, [NOW])
    found = told(syntax, f"so {call} ok</think>b", thinking=True)
    if syntax == "kimi_k2":
        assert found == [Reasoning("so"), NOW, Content("ok</think>b")]
    else:
        assert found == [Reasoning(f"so {call} ok"), Content("b")]


@pytest.mark.parametrize("syntax", NAMES)
def test_without_functions_calls_are_content(syntax: str) -> None:
    call = write_calls(syntax, [NOW])
    assert told(syntax, f"a\n{call} ", functions=None) == [Content(f"a\n{call} ")]


def test_reasoning() -> None:
    for as_tokens in (False, True):
        mark = markers(chat_format("glm45"), as_tokens=as_tokens).seen
        for text, thinking, wanted in (
            ("so</think>\n\nb ", True, [Reasoning("so"), Content("b ")]),
            (" so \n", True, [Reasoning("so \n")]),  # it has not ended
            ("\n<think>\nso\n</think>\n\nb", False, [Reasoning("so"), Content("b")]),
            ("<think></think> b", False, [Content("b")]),
            ("  b", False, [Content("  b")]),
            ("", True, []),
            ("so</think>", True, [Reasoning("so")]),
        ):
            assert told("glm45", mark(text), thinking=thinking, as_tokens=as_tokens) == wanted
    mark = markers(chat_format("glm45"), as_tokens=True).seen
    # later on, a token opens it again; a text speaks of it
    again = [Content("a "), Reasoning("so"), Content("b")]
    assert told("glm45", mark("a <think>so</think>b"), as_tokens=True) == again
    assert told("glm45", mark("</think>a"), as_tokens=True) == [Content("a")]
    assert told("glm45", "a <think>so</think>b") == [Content("a <think>so</think>b")]


REASONS = {
    ("deepseek_v31", "f<｜tool▁sep｜>[]"): "the arguments are no JSON object",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": NaN}'): "not JSON: no value where one belongs",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": 01}'): "not JSON: no value where one belongs",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": 1,}'): "not JSON: a name in an object begins with",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": [1 2]}'): "not JSON: no comma where one belongs",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": "\\x"}'): "not JSON: an escape that there is not",
    ("deepseek_v31", "f<｜tool▁sep｜>{} and"): "more than a JSON object in the arguments",
    ("deepseek_v31", "<｜tool▁sep｜>{}"): "it names no function",
    ("deepseek_v31", "a b<｜tool▁sep｜>{}"): "'a b' names none of the functions offered",
    ("deepseek_v31", "a" * 257 + "<｜tool▁sep｜>{}"): "a name of more than 256 characters",
    ("deepseek_v31", "f{}"): "no separator behind the name",
    ("deepseek_v3", "function<｜tool▁sep｜>f\n{}"): "no ```json before the arguments",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": ' + "[" * 200): "not JSON: nested deeper than 128",
    ("deepseek_v31", 'f<｜tool▁sep｜>{"a": ' + "1" * 401): "not JSON: a number of more than 400",
}


def test_what_is_wrong_with_a_call_is_said() -> None:
    open_, close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    for (syntax, body), reason in REASONS.items():
        call = f"{open_}{body}{close}"
        text = f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>after"
        first, last = told(syntax, text)
        assert isinstance(first, Malformed)
        assert first.reason.startswith(reason), (body, first.reason)
        assert (first.text, last) == (call, Content("after"))
    for name, text, reason in (
        ("glm47", "<tool_call>f<arg_key>a</arg_key>x</tool_call>", "no value behind a parameter"),
        ("glm47", "<tool_call>f<arg_key>a</tool_call>", "no end of a parameter's name"),
        ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>x</tool_call>", "no end of param"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "it has no arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "it names no function"),
        ("hermes", '<tool_call>{"name": "f", "name": "g"}</tool_call>', "'name' is there twice"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "the arguments are"),
        ("hermes", "<tool_call>f()</tool_call>", "the call is no JSON object"),
        ("kimi_k2", "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>", "id '3"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>", "no arguments behind"),
    ):
        (found,) = told(name, text)
        assert isinstance(found, Malformed)
        assert found.reason.startswith(reason), found.reason
        assert found.text == text


def test_calls_that_follow_a_malformed_one() -> None:
    for syntax in NAMES:
        good = write_calls(syntax, [NOW, NOW])
        place = good.index("now") + 3
        broken = good[:place] + ' "x' + good[place:]
        found = told(syntax, broken)
        assert [type(event) for event in found] == [Malformed, Call], syntax
        found = told(syntax, good[: good.rindex("now")] + good)  # one within the other
        assert found[0] == NOW, syntax
        assert found[-1] == NOW, syntax


def dsml(inner: str) -> str:
    return f'<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather">{inner}</｜DSML｜invoke>'


def test_ways_to_write_a_call() -> None:
    """That the models have besides the usual one."""
    (found,) = told("deepseek_v4", dsml('\n{"text": "x"}\n'))
    assert found == Call("get_weather", {"text": "x"})
    (found,) = told(
        "deepseek_v4", '<｜DSML｜tool_calls><｜DSML｜invoke name="now"/></｜DSML｜tool_calls>'
    )
    assert found == NOW
    parameter = '<｜DSML｜parameter name="{}"{}>{}</｜DSML｜parameter>'
    for name, kind, value, wanted in (
        ("text", "", "5", "5"),
        ("number", "", "5", 5),
        ("text", ' string="false"', "[5]", [5]),
        ("number", ' string="true"', " 5 ", " 5 "),
        ("number", ' string="false"', "five", "five"),  # no JSON, but a text
        ("flag", ' string="false"', " true\n", True),
        ("text", ' string="true"', "", ""),
        ("number", ' string="false"', "1e400", "1e400"),
    ):
        (found,) = told("deepseek_v4", dsml(parameter.format(name, kind, value)))
        if value == "1e400":  # JSON has no largest number
            continue
        assert found == Call("get_weather", {name: wanted}), (name, kind, value)
    twice = parameter.format("text", ' string="true"', "a") * 2
    (found,) = told("deepseek_v4", dsml(twice))
    assert isinstance(found, Malformed)
    bare = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # without a section
    assert told("deepseek_v31", f"a {bare}{bare} b") == [Content("a"), NOW, NOW, Content(" b")]
    with_args = '<tool_call>{"arguments": "{\\"text\\": 1}", "id": [1], "name": "now"}</tool_call>'
    assert told("hermes", with_args) == [Call("now", {"text": 1})]
    kimi = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    one = Functions({"now": {}})
    for header, wanted in (("functions.now:3", NOW), ("now:0", NOW), ("now", NOW), ("7", NOW)):
        found = told("kimi_k2", kimi.format(f" {header}\n"), functions=one)
        assert found == [wanted], header
    dotted = Functions({"a.b": {}})
    raw = parse(chat_format("kimi_k2"), [kimi.format("functions.a.b:12")], functions=dotted)
    assert raw[0] == CallStart(0, "functions.a.b:12", "a.b")


def test_glm_values_have_the_types_of_the_schema() -> None:
    pair = "<arg_key>{}</arg_key><arg_value>{}</arg_value>"
    for name, value, wanted in (
        ("text", "5", "5"),
        ("text", " a\n<b> ", " a\n<b> "),
        ("number", " 5 ", 5),
        ("number", "1.50", 1.5),
        ("number", "five", "five"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("maybe", '"x"', '"x"'),
        ("thing", '{"a": "}"}', {"a": "}"}),
        ("new", "5", 5),  # of which the schema knows nothing
        ("new", "[a", "[a"),
        ("new", '"x"', '"x"'),
    ):
        text = f"<tool_call>get_weather{pair.format(name, value)}</tool_call>"
        assert told("glm47", text) == [Call("get_weather", {name: wanted})], (name, value)
    either = {"properties": {"level": {"type": ["number", "string"]}}}
    for value, wanted in (("5", 5), ("5.5", 5.5), ("low", "low")):
        text = f"<tool_call>set{pair.format('level', value)}</tool_call>"
        found = told("glm47", text, functions=Functions({"set": either}))
        assert found == [Call("set", {"level": wanted})]
    (broken,) = told("glm47", f"<tool_call>get_weather{pair.format('list', '[1')}</tool_call>")
    assert isinstance(broken, Malformed)  # a piece of it was streamed as a list


def test_types_by_schema() -> None:
    root = {"$defs": {"a/b": {"enum": [1, None]}, "loop": {"$ref": "#/$defs/loop"}}}
    for schema, wanted in (
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer", "null"}),
        ({"oneOf": [{"const": "x"}, {"type": "array"}]}, {"string", "array"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        *(({}, None), (True, None), (None, None), ({"type": "text"}, None)),
        *(({"$ref": "#/$defs/loop"}, None), ({"$ref": "other.json"}, None)),
    ):
        found = types_of(schema, root)
        assert found == (None if wanted is None else frozenset(wanted)), schema


@given(value=TEXTS, cuts=CUTS)
def test_json_is_read_as_python_reads_it(value: str, cuts: set[int]) -> None:
    for text in (value, json.dumps([value]), f'{{"a": {value}}}', f'"{value}"'):
        found = read_json(text)
        try:
            wanted = json.loads(text, parse_constant=lambda _: NOT_JSON, strict=False)
        except ValueError:
            wanted = NOT_JSON
        if "NaN" not in text:
            assert found == wanted or found is wanted is NOT_JSON, text
        check, passed, left = JsonText(), "", ""
        for piece in cut(text, cuts):
            left += piece
            left = left[check.feed(left, False) :]
            passed += check.taken()
        left = left[check.feed(left, True) :]
        passed += check.taken()
        if found is not NOT_JSON:
            assert check.done
            assert json.loads(passed) == found


# -- which format ----------------------------------------------------------------------------------


def found(
    template: str = "", tokens: str = "", encoding: str | None = None, **named: str
) -> tuple[str, str]:
    known = set(tokens.split())
    format_ = find_format(
        encoding=encoding, templates={"default": template}, has_token=known.__contains__, **named
    )
    return format_.calls.value, format_.reasoning.value


def test_the_format_is_read_off_the_checkpoint() -> None:
    for template, wanted in (
        ("<｜DSML｜function_calls>", ("deepseek_v32", "none")),
        ("<｜DSML｜tool_calls></think>", ("deepseek_v4", "think")),
        ("<｜tool▁sep｜>' + name + '\\n```json", ("deepseek_v3", "none")),
        ("name + '<｜tool▁sep｜>'</think>", ("deepseek_v31", "think")),
        ("<|tool_calls_section_begin|></think>", ("kimi_k2", "kimi_k2")),
        ("<tool_call>{{ n }}<arg_key>{{ k }}</arg_key><arg_value>", ("glm47", "none")),
        ("<tool_call>{{ n }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", ("glm45", "none")),
        ('<tool_call>\n{"name": n, "arguments": a}', ("hermes", "none")),
        ("{{ messages }}", ("none", "none")),
    ):
        assert found(template) == wanted
    assert found(tokens="<arg_key> <arg_value> <think> </think>") == ("glm45", "think")
    assert found(tokens="<|tool_calls_section_begin|> <think>") == ("kimi_k2", "none")
    assert found("<arg_key>", encoding="deepseek_v4") == ("deepseek_v4", "think")
    assert found("<arg_key></think>", reasoning_parser="none") == ("glm45", "none")
    assert found("</think>", tool_call_parser="Kimi-K2") == ("kimi_k2", "kimi_k2")
    assert found(tool_call_parser="qwen25", reasoning_parser="deepseek-r1") == ("hermes", "think")
    with pytest.raises(
        UsageError, match=r"tool_call_parser = 'glm46': accepted: .*nearest known name is 'glm47'"
    ):
        found(tool_call_parser="glm46")
    with pytest.raises(UsageError, match="reasoning_parser = 'x': accepted: deepseek_r1, "):
        found(reasoning_parser="x")
    assert FUNCTIONS.names == ("get_weather", "now", "f")
