"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trueline.errors import UsageError
from trueline.text.chat import render_chat
from trueline.text.templates import _compiled, _environment
from trueline.text.tokenizer import Tokenizer

Tiny = Callable[..., Path]

MESSAGES = [
    {"role": "system", "content": "Be <brief> & «kind»."},
    {"role": "user", "content": "Say 'hi'\n  twice"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "hi", "arguments": {"n": 2, "to": "日本"}}}
        ],
    },
    {"role": "tool", "content": "hi hi", "name": "hi"},
    {"role": "assistant", "content": " done ", "reasoning_content": "because"},
    {"role": "user", "content": "thanks"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "hi", "parameters": {"z": [1, 2.5, True, None], "a": "<&>'\""}},
    }
]

TEMPLATES = {
    "namespace": """
{%- set ns = namespace(found=false, text='', n=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.found = true -%}
        {%- set ns.text = message.content -%}
    {%- else -%}
        {%- set ns.n = ns.n + 1 -%}
    {%- endif -%}
{%- endfor -%}
{{ bos_token }}{{ ns.found }}|{{ ns.text }}|{{ ns.n }}
{%- if add_generation_prompt %}<a>{% endif %}
""",
    "loop controls": """
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 4 %}
        {% break %}
    {% endif %}
{{ loop.index0 }}:{{ message['role'] | upper }}{{ ' (last)' if loop.last }}
{% else %}
nothing
{% endfor %}
""",
    "tojson": """
{{- tools | tojson }}
{{ tools | tojson(indent=2) }}
{{ messages[0] | tojson(ensure_ascii=True) }}
{{ messages[2].tool_calls | tojson(sort_keys=True, separators=(',', ':')) }}
""",
    "macros": """
{%- macro turn(role, content='-', last=false) -%}
    <{{ role }}>{{ content | trim if content else '(none)' }}</{{ role }}>
    {%- if last %}!{% endif -%}
{%- endmacro -%}
{%- for message in messages %}
{{ turn(message.role, message.content, last=loop.last) }}
{%- endfor %}
""",
    "whitespace": """
  {% if true %}
    kept indent
  {% endif %}
{%+ if true %}  plus {% endif +%}

{{- 'tight' -}}

  tail  {# a comment #}
end
""",
    "calls": """
{%- for message in messages if message.tool_calls is defined -%}
    {%- for call in message.tool_calls -%}
        {%- for key, value in call.function.arguments.items() -%}
            {{ key }}={{ value | string }};
        {%- endfor -%}
        {{ call.function.arguments is mapping }}{{ call.function.name is string }}
    {%- endfor -%}
{%- endfor -%}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}
{{ messages[::-1][0].content.split('a')[-1] }}{{ messages[-1]['nothing'] is defined }}
{{ messages | length }}{{ range(3) | list }}{{ dict(a=1) }}{{ 'x' ~ 1 }}{{ 7 // 2 }}
""",
    "generation": """
{%- set who = 'outside' -%}
{%- for message in messages if message.role == 'assistant' -%}
    {% generation %}
    {%- set who = 'inside' %}
    [{{ message.content }}/{{ message.reasoning_content }}/{{ who }}]
    {% endgeneration %}
{%- endfor -%}
{% generation %}{% set who = 'at the top' %}{{ who }}{% endgeneration %}
{{ who }}
""",
    "reasoning": """
{%- for message in messages -%}
    {{ message.reasoning_content }}.{{ message.thinking }}.{{ message.reasoning }};
{%- endfor -%}
""",
    "arguments": "{{ enable_thinking }}{{ missing is defined }}{{ tools }}{{ documents }}"
    "{{ strftime_now('%Y') }}{{ eos_token }}{{ pad_token }}",
}


@pytest.fixture(scope="module")
def oracle(tiny: Tiny) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(tiny("deepseek_v3")))


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Tokenizer:
    return Tokenizer.load(tiny("deepseek_v3"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("prompt", [False, True])
def test_as_transformers(
    name: str, with_tools: bool, prompt: bool, oracle: Any, tokenizer: Tokenizer
) -> None:
    tools = TOOLS if with_tools else None
    wanted = oracle.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        tools=tools,
        add_generation_prompt=prompt,
        tokenize=False,
        enable_thinking=False,
    )
    given = {**tokenizer.special_tokens, "enable_thinking": False}
    found = render_chat(TEMPLATES[name], MESSAGES, prompt, tools, **given)
    assert found == wanted
    assert wanted.strip()


def test_a_model_s_own_template(oracle: Any, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = render_chat(tokenizer, messages)
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert text == oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 6
    assert render_chat(tokenizer, messages, add_generation_prompt=False).endswith("<|end|>")
    assert render_chat(tokenizer, messages, bos_token="B").startswith("B<|user|>")


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": ""}]
    for content in (parts, tuple(parts)):
        message = {"role": "user", "content": content}
        assert render_chat("{{ messages[0].content }}", [message]) == "a\nb\n"
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": []}]) == ""


def test_reasoning_by_any_name() -> None:
    for name in ("reasoning", "thinking", "reasoning_content"):
        messages = [{"role": "assistant", "content": "x", name: "why"}]
        assert render_chat("{{ messages[0].reasoning_content }}", messages) == "why"


def test_kimi_s_tools_are_sorted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tokenizer), "sorts_tools", property(lambda _: True))
    monkeypatch.setattr(tokenizer, "chat_templates", {"default": "{{ tools | tojson }}"})
    found = render_chat(tokenizer, [{"role": "user", "content": ""}], tools=TOOLS)
    assert found == json.dumps(TOOLS, sort_keys=True, ensure_ascii=False)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], "at least one message"),
        ("hi", "messages = 'hi'"),
        ({"role": "user"}, "accepted: a list"),
        (None, "messages = None"),
        ([USER, "hi"], "messages[1] = 'hi'"),
        ([{"content": "x"}], "messages[0].role = None"),
        ([{"role": 3, "content": "x"}], "messages[0].role = 3"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content = 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url' is not supp"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] = "),
        ([{"role": "user", "content": [{"text": "x"}]}], "{'type': 'text', 'text': 'hello'}"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0] = 7"),
        ([{**USER, "when": Path("x")}], "messages[0].when is a PosixPath"),
    ],
)
def test_refuses_messages(messages: Any, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat("{{ messages }}", messages)
    assert part in str(caught.value)


def test_refuses_tools_and_arguments() -> None:
    for tools in ("x", {"a": 1}, [1]):
        with pytest.raises(UsageError, match="tools = "):
            render_chat("", [USER], tools=tools)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"thing\.a is a object"):
        render_chat("", [USER], thing={"a": object()})


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('only users, please') }}", "messages: only users, please"),
        ("a\n{% if %}", "chat template, line 2"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ range(10000000) | list }}", "OverflowError"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_template_errors(template: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat(template, [USER])
    assert part in str(caught.value)
    assert str(caught.value).startswith("chat template")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.x }}",
        "{{ (messages | attr('__class__')) + '' }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__code__.x }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format(messages) + '' }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace(_a=1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.clear() }}",
        "{{ dict.update(messages[0], role='x') }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(UsageError, match="chat template"):
        render_chat(template, messages)
    assert messages == [USER]


def test_templates_get_a_copy() -> None:
    """What a template could reach through a hole in the sandbox is not the caller's."""
    message = {**USER, "extra": {"a": [1]}}
    seen: list[Any] = []
    _environment().filters["look"] = lambda value: seen.append(value) or ""
    try:
        render_chat("{{ messages[0].extra | look }}", [message])
    finally:
        del _environment().filters["look"]
    seen[0]["a"].append(2)
    assert message["extra"] == {"a": [1]}


def test_templates_are_compiled_once() -> None:
    template = "{{ messages[0].content }} once"
    render_chat(template, [USER])
    before = _compiled.cache_info().hits
    render_chat(template, [USER])
    assert _compiled.cache_info().hits == before + 1
