"""DeepSeek-V4's encoding: prompts as its published encoder makes them.

Every prompt below was compared with what two public encoders make of the same messages.
"""

from __future__ import annotations

import itertools
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import published
from deepseek_chats import TASKS, TOKENS, A, B, E, N, R, T, U, make
from trueline.describe import describe
from trueline.errors import UsageError
from trueline.evaluate.match import without_reasoning
from trueline.server.protocol import ApiError, RequestLimits, chat_prompt, read_chat
from trueline.text.chat import render_chat
from trueline.text.deepseek_v4_files import PROFILES, read_defaults
from trueline.text.tokenizer import Tokenizer

DRAFTS = {"dspark_block_size": 5}


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("preview"))


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("official"), **DRAFTS)


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM = said("system", "Be <b>{kind}</b>.\n")
HI, TWICE = said("user", "hi"), said("user", " twice\n")
HELLO = said("assistant", "hello", reasoning_content="a greeting")
DONE = said("assistant", "done", reasoning="again")
PLAIN = said("assistant", None)
RULES = said("developer", "rules")
TODAY = said("latest_reminder", "2026-11-17")

# messages -> prompts without thinking, with it, and with all of it kept
PROMPTS: dict[str, tuple[list[dict[str, Any]], str, str, str]] = {
    "user": ([HI], f"{B}{U}hi{A}{N}", f"{B}{U}hi{A}{T}", f"{B}{U}hi{A}{T}"),
    "nothing said": (
        [said("user", "")],
        f"{B}{U}{A}{N}",
        f"{B}{U}{A}{T}",
        f"{B}{U}{A}{T}",
    ),
    "system": (
        [SYSTEM, HI],
        f"{B}Be <b>{{kind}}</b>.\n{U}hi{A}{N}",
        f"{B}Be <b>{{kind}}</b>.\n{U}hi{A}{T}",
        f"{B}Be <b>{{kind}}</b>.\n{U}hi{A}{T}",
    ),
    "system alone": ([said("system", "s")], f"{B}s", f"{B}s", f"{B}s"),
    "two turns": (
        [HI, HELLO, TWICE],
        f"{B}{U}hi{A}{N}hello{E}{U} twice\n{A}{N}",
        f"{B}{U}hi{A}{N}hello{E}{U} twice\n{A}{T}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}{U} twice\n{A}{T}",
    ),
    "an answer last": (
        [HI, HELLO],
        f"{B}{U}hi{A}{N}hello{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}",
    ),
    "three turns": (
        [SYSTEM | {"content": "s"}, HI, HELLO, TWICE, DONE, HI, PLAIN],
        f"{B}s{U}hi{A}{N}hello{E}{U} twice\n{A}{N}done{E}{U}hi{A}{N}{E}",
        f"{B}s{U}hi{A}{N}hello{E}{U} twice\n{A}{N}done{E}{U}hi{A}{T}{N}{E}",
        f"{B}s{U}hi{A}{T}a greeting{N}hello{E}{U} twice\n{A}{T}again{N}done{E}{U}hi{A}{T}{N}{E}",
    ),
    "a user goes on": (
        [HI, TWICE, HELLO, TWICE, HI, said("user", "")],
        f"{B}{U}hi\n\n twice\n{A}{N}hello{E}{U} twice\n\n\nhi\n\n{A}{N}",
        f"{B}{U}hi\n\n twice\n{A}{N}hello{E}{U} twice\n\n\nhi\n\n{A}{T}",
        f"{B}{U}hi\n\n twice\n{A}{T}a greeting{N}hello{E}{U} twice\n\n\nhi\n\n{A}{T}",
    ),
    "an assistant goes on": (
        [HI, HELLO, DONE],
        f"{B}{U}hi{A}{N}hello{E}done{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}again{N}done{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}again{N}done{E}",
    ),
    "an assistant begins": (
        [DONE, HI],
        f"{B}done{E}{U}hi{A}{N}",
        f"{B}done{E}{U}hi{A}{T}",
        f"{B}again{N}done{E}{U}hi{A}{T}",
    ),
    "no user": ([DONE], f"{B}done{E}", f"{B}again{N}done{E}", f"{B}again{N}done{E}"),
    "developer": ([RULES], f"{B}{U}rules{A}{N}", f"{B}{U}rules{A}{T}", f"{B}{U}rules{A}{T}"),
    "developer before a user": (
        [RULES, HI],
        f"{B}{U}rules{U}hi{A}{N}",
        f"{B}{U}hi{A}{T}",
        f"{B}{U}rules{U}hi{A}{T}",
    ),
    "developer between": (
        [HI, RULES, TWICE],
        f"{B}{U}hi{U}rules{U} twice\n{A}{N}",
        f"{B}{U}hi{U} twice\n{A}{T}",
        f"{B}{U}hi{U}rules{U} twice\n{A}{T}",
    ),
    "developer answered": (
        [RULES, HELLO, RULES, DONE],
        f"{B}{U}rules{A}{N}hello{E}{U}rules{A}{N}done{E}",
        f"{B}hello{E}{U}rules{A}{T}again{N}done{E}",
        f"{B}{U}rules{A}{T}a greeting{N}hello{E}{U}rules{A}{T}again{N}done{E}",
    ),
    "reminder": (
        [SYSTEM | {"content": "s"}, TODAY, HI],
        f"{B}s{R}2026-11-17{U}hi{A}{N}",
        f"{B}s{R}2026-11-17{U}hi{A}{T}",
        f"{B}s{R}2026-11-17{U}hi{A}{T}",
    ),
    "reminder in a turn": (
        [HI, HELLO, TODAY, TWICE, TODAY, DONE],
        f"{B}{U}hi{A}{N}hello{E}{R}2026-11-17{U} twice\n{A}{N}{R}2026-11-17done{E}",
        f"{B}{U}hi{A}{N}hello{E}{R}2026-11-17{U} twice\n{A}{T}{R}2026-11-17again{N}done{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}{R}2026-11-17{U} twice\n{A}{T}{R}2026-11-17again{N}"
        f"done{E}",
    ),
    "system between": (
        [HI, HELLO, said("system", "s"), TWICE],
        f"{B}{U}hi{A}{N}hello{E}s{U} twice\n{A}{N}",
        f"{B}{U}hi{A}{N}hello{E}s{U} twice\n{A}{T}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}s{U} twice\n{A}{T}",
    ),
    "action": (
        [HI, HELLO, TWICE | {"task": "action"}],
        f"{B}{U}hi{A}{N}hello{E}{U} twice\n{A}{N}<｜action｜>",
        f"{B}{U}hi{A}{N}hello{E}{U} twice\n{A}{T}<｜action｜>",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}{U} twice\n{A}{T}<｜action｜>",
    ),
    "action answered": (
        [HI | {"task": "action"}, said("assistant", "Search"), TWICE],
        f"{B}{U}hi{A}{N}<｜action｜>Search{E}{U} twice\n{A}{N}",
        f"{B}{U}hi{A}{T}<｜action｜>Search{E}{U} twice\n{A}{T}",
        f"{B}{U}hi{A}{T}<｜action｜>Search{E}{U} twice\n{A}{T}",
    ),
    "title": (
        [HI, HELLO | {"task": "title"}, DONE],
        f"{B}{U}hi{A}{N}hello{E}<｜title｜>done{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}<｜title｜>done{E}",
        f"{B}{U}hi{A}{T}a greeting{N}hello{E}<｜title｜>done{E}",
    ),
    **{
        task: ([RULES, HI | {"task": task}], f"{B}{U}rules{U}hi<｜{task}｜>",
               f"{B}{U}hi<｜{task}｜>", f"{B}{U}rules{U}hi<｜{task}｜>")
        for task in ("query", "authority", "domain", "read_url")
    },
}  # fmt: skip
MODES = ({"thinking": False}, {"thinking": True}, {"thinking": True, "drop_thinking": False})


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, preview: Tokenizer) -> None:
    messages, *wanted = PROMPTS[name]
    found = [render_chat(preview, messages, **mode) for mode in MODES]
    assert found == wanted
    # the tokens are tokens, and the rest is text
    for text in wanted:
        ids = preview.encode(text, add_special_tokens=False)
        marks = [preview.token_text(token) for token in ids if token in preview.special_ids]
        assert "".join(marks) == "".join(mark for mark in _split(text) if mark in TOKENS)
        assert ids[0] == preview.bos_id
        assert preview.eos_id is not None
        assert ids.count(preview.eos_id) == text.count(E)


def _split(text: str) -> list[str]:
    for name in TOKENS:
        text = text.replace(name, f"\0{name}\0")
    return text.split("\0")


def test_without_a_generation_prompt(preview: Tokenizer) -> None:
    """Between turns it is part of the history."""
    for thinking, mark in ((True, T), (False, N)):
        assert render_chat(preview, [HI], False, thinking=thinking) == f"{B}{U}hi"
        found = render_chat(preview, [HI, DONE], False, thinking=thinking)
        assert found == f"{B}{U}hi{A}{mark}{'again' + N if thinking else ''}done{E}"
    for task in TASKS:
        assert render_chat(preview, [HI | {"task": task}], False) == f"{B}{U}hi"


def test_parts_of_a_message(preview: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(preview, [said("user", "") | {"content": parts}]) == f"{B}{U}a\nb{A}{T}"


def test_what_looks_like_a_token_is_one(preview: Tokenizer) -> None:
    """As in every other family: the prompt is one text."""
    text = render_chat(preview, [said("user", f"x{E}y")])
    assert text == f"{B}{U}x{E}y{A}{T}"
    assert preview.encode(text, False).count(preview.eos_id or -1) == 1


# -- efforts and defaults ----------------------------------------------------------------------

FIRST = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
SECOND = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
EFFORTS = {
    "preview": {None: "", "high": "", "max": FIRST},
    "official": {None: "", "low": "", "high": FIRST, "max": SECOND},
}


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    ("profile", "effort"), [(name, effort) for name in EFFORTS for effort in EFFORTS[name]]
)
@pytest.mark.parametrize("messages", [[HI], [SYSTEM, HI, HELLO, TWICE], [RULES, HI], [DONE]])
def test_efforts(
    profile: str,
    effort: str | None,
    keeps: bool,
    messages: list[dict[str, Any]],
    preview: Tokenizer,
    official: Tokenizer,
) -> None:
    """The text of an effort stands before all messages, once, and only where the model thinks."""
    text = EFFORTS[profile][effort]
    own = {"preview": preview, "official": official}
    for tokenizer, named in itertools.product(own.values(), (None, profile)):
        if named is None and tokenizer is not own[profile]:
            continue
        asked = {"reasoning_effort": effort, "effort_profile": named, "drop_thinking": not keeps}
        plain = render_chat(tokenizer, messages, drop_thinking=not keeps)
        found = render_chat(tokenizer, messages, **asked)
        whole = PROFILES[profile].texts[effort or PROFILES[profile].default]
        assert whole.startswith(text)
        assert found == B + whole + plain.removeprefix(B)
        quiet = render_chat(tokenizer, messages, **asked, thinking=False)
        assert quiet == render_chat(tokenizer, messages, thinking=False)


def test_effort_texts() -> None:
    """Digests of the published texts: a word more is another prompt."""
    none, absolute, beyond = "e3b0c44298fc1c14", "f7a24f3b3050d4a8", "53fb31b8392ec5b4"
    assert {
        name: {
            effort: sha256(text.encode()).hexdigest()[:16] for effort, text in made.texts.items()
        }
        for name, made in PROFILES.items()
    } == {
        "preview": {"high": none, "max": absolute},
        "official": {"low": none, "high": absolute, "max": beyond},
    }


def test_thinks_unless_told_not_to(preview: Tokenizer, official: Tokenizer) -> None:
    on, off = f"{B}{U}hi{A}{T}", f"{B}{U}hi{A}{N}"
    for tokenizer in (preview, official):
        for arguments, wanted in (
            ({}, on),
            ({"thinking": None, "enable_thinking": None, "reasoning_effort": None}, on),
            ({"thinking": True}, on),
            ({"enable_thinking": True}, on),
            ({"thinking": True, "enable_thinking": True}, on),
            ({"thinking": False}, off),
            ({"enable_thinking": False}, off),
            ({"reasoning_effort": "none"}, off),
            ({"reasoning_effort": "none", "thinking": False}, off),
            ({"reasoning_effort": "max", "thinking": False}, off),
        ):
            assert render_chat(tokenizer, [HI], **arguments) == wanted, arguments


OF_PREVIEW = "REASONING_EFFORT_MAX = ('more ' 'thought\\n')\n"
OF_OFFICIAL = (
    "REASONING_EFFORT_PROMPTS: Dict[str, str] = {'low': '', 'high': 'more\\n', 'max': 'all\\n'}\n"
    "DEFAULT_REASONING_EFFORT = 'low'\n"
)
QUIET = "def encode_messages(messages, thinking_mode='chat', *, x=1): ...\n"
KEYWORD = "def encode_messages(messages, *, n, thinking_mode='chat'): ...\n"
OFF_BY_ONE = "def encode_messages(thinking_mode, mode='chat'): ...\n"
FILES: dict[str, tuple[str, dict[str, str], str, bool, str]] = {
    # program -> efforts, the default one, thinking, what says so
    "preview": (OF_PREVIEW, {"high": "", "max": "more thought\n"}, "high", True, "_MAX"),
    "official": (
        OF_OFFICIAL, {"low": "", "high": "more\n", "max": "all\n"}, "low", True, "_PROMPTS",
    ),
    "both": (
        OF_PREVIEW + OF_OFFICIAL, {"low": "", "high": "more\n", "max": "all\n"}, "low", True,
        "_PROMPTS",
    ),
    "another default": (
        OF_OFFICIAL.replace("= 'low'", "= 'max'"), {"low": "", "high": "more\n", "max": "all\n"},
        "max", True, "_PROMPTS",
    ),
    "quiet": (OF_PREVIEW + QUIET, {"high": "", "max": "more thought\n"}, "high", False, "_MAX"),
    "keyword": (OF_PREVIEW + KEYWORD, {"high": "", "max": "more thought\n"}, "high", False, "_MAX"),
    "off by one": (
        OF_PREVIEW + OFF_BY_ONE, {"high": "", "max": "more thought\n"}, "high", True, "_MAX",
    ),
}  # fmt: skip


def with_program(directory: Path, program: str, **config: Any) -> Tokenizer:
    (directory / "encoding").mkdir(exist_ok=True)
    (directory / "encoding" / "encoding_dsv4.py").write_text(program)
    return make(directory, **config)


@pytest.mark.parametrize("config", [{}, DRAFTS])
@pytest.mark.parametrize("name", FILES)
def test_the_checkpoint_s_own_program(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """It is read and wins over what the config's keys would mean; it never runs."""
    program, texts, chosen, thinking, key = FILES[name]
    tokenizer = with_program(tmp_path, program + "raise SystemExit(7)\n", **config)
    mark = T if thinking else N
    default = f"{B}{texts[chosen] if thinking else ''}{U}hi{A}{mark}"
    assert render_chat(tokenizer, [HI]) == default
    for effort, text in texts.items():
        found = render_chat(tokenizer, [HI], thinking=True, reasoning_effort=effort)
        assert found == f"{B}{text}{U}hi{A}{T}"
    found = render_chat(tokenizer, [HI], thinking=True, effort_profile="preview")
    assert found == f"{B}{U}hi{A}{T}"
    defaults = read_defaults({"model_type": "deepseek_v4"}, tmp_path)
    assert defaults is not None
    assert defaults.profile.value.name == "its own"
    assert defaults.profile.source.text.endswith(key)


@pytest.mark.parametrize(
    "program",
    [
        "",
        "REASONING_EFFORT_MAX = make()\n",
        OF_PREVIEW + "REASONING_EFFORT_MAX = make()\n",
        "REASONING_EFFORT_MAX = 3\n",
        "def f():\n    REASONING_EFFORT_MAX = 'x'\n",
        OF_OFFICIAL.replace("'low'\n", "'none'\n"),
        OF_OFFICIAL.replace("DEFAULT", "OTHER"),
        OF_OFFICIAL.replace("'low'\n", "['low']\n"),
        OF_OFFICIAL.replace("'more\\n'", "1"),
        OF_OFFICIAL + "REASONING_EFFORT_PROMPTS = None",
    ],
)
def test_a_program_that_says_nothing(program: str, tmp_path: Path) -> None:
    with_program(tmp_path, program)
    for config, wanted in (({}, "preview"), (DRAFTS, "official")):
        found = read_defaults({"model_type": "deepseek_v4"} | config, tmp_path)
        assert found is not None
        assert found.profile.value is PROFILES[wanted]
        assert found.profile.source.kind == ("formula" if config else "default")


@pytest.mark.parametrize(
    "program",
    [
        "def",
        "\0",
        "(" * 5000 + ")" * 5000,
        "x = " + "a." * 5000 + "b",  # RecursionError
        "x = " + "-" * 50_000 + "1",  # MemoryError
        "#" * ((1 << 20) + 1),
    ],
    ids=["syntax", "zero", "brackets", "deep", "deeper", "long"],
)
def test_a_program_that_cannot_be_read(program: str, tmp_path: Path) -> None:
    tokenizer = with_program(tmp_path, program)
    with pytest.raises(UsageError, match=r"encoding_dsv4\.py: "):
        render_chat(tokenizer, [HI])
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text("#" * (1 << 20))
    assert render_chat(tokenizer, [HI]) == f"{B}{U}hi{A}{T}"


def test_named_by_its_texts(tmp_path: Path) -> None:
    for name, key in (
        ("preview", "REASONING_EFFORT_MAX"),
        ("official", "REASONING_EFFORT_PROMPTS"),
    ):
        texts = PROFILES[name].texts
        said = texts["max"] if name == "preview" else texts
        program = f"{key} = {said!r}\nDEFAULT_REASONING_EFFORT = 'low'\n"
        with_program(tmp_path, program)
        found = read_defaults({"model_type": "deepseek_v4"}, tmp_path)
        assert found is not None
        assert found.profile.value == PROFILES[name]


# -- which tokenizers have it ------------------------------------------------------------------


def test_a_template_wins(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    assert tokenizer.has_chat_form
    tokenizer.chat_templates = {"default": "{{ messages[0].content }}"}  # serve --chat-template
    assert (tokenizer.has_chat_form, render_chat(tokenizer, [HI])) == (True, "hi")
    (tmp_path / "chat_template.jinja").write_text("{{ x }}")
    assert render_chat(Tokenizer.load(tmp_path), [HI], x="y") == "y"
    assert describe_chat(tmp_path) is None


def test_other_families_have_none(tmp_path: Path) -> None:
    for kind in ("deepseek_v3", "deepseek_v41", None):
        tokenizer = make(tmp_path, model_type=kind)
        assert not tokenizer.has_chat_form
        with pytest.raises(UsageError, match="no chat template 'default'"):
            render_chat(tokenizer, [HI])
    (tmp_path / "config.json").unlink()
    assert not Tokenizer.load(tmp_path).has_chat_form


@pytest.mark.parametrize("missing", [U, A, T, N, R, "<｜query｜>"])
def test_tokens_that_the_vocabulary_lacks(missing: str, tmp_path: Path) -> None:
    """Only where the messages need them."""
    tokenizer = make(tmp_path, tuple(name for name in TOKENS if name != missing))
    messages = [TODAY, HI | {"task": "query"}]
    with pytest.raises(UsageError, match=f"encoding needs {missing}, which"):
        render_chat(tokenizer, messages)
    if missing not in (U, A, T, N):
        assert render_chat(tokenizer, [HI]) == f"{B}{U}hi{A}{T}"


def test_ends_as_the_tokenizer_names_them(tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert render_chat(tokenizer, [DONE, HI]) == f"<|begin|>done<|end|>{U}hi{A}{T}"
    file.write_text("{}")
    assert render_chat(Tokenizer.load(tmp_path), [DONE, HI]) == f"{B}done{E}{U}hi{A}{T}"


def describe_chat(model: Path) -> Any:
    (model / "config.json").write_text(json.dumps(published.V4_FLASH))
    return describe(model)["chat"]


def test_inspect(tmp_path: Path) -> None:
    make(tmp_path)
    for program, profile, efforts in (
        (None, "preview", ["high", "max"]),
        (OF_OFFICIAL, "its own", ["low", "high", "max"]),
    ):
        if program is not None:
            with_program(tmp_path, program)
        chat = describe_chat(tmp_path)
        assert chat["kind"] == "encoding of DeepSeek-V4"
        assert {fact["name"]: fact["value"] for fact in chat["facts"]} == {
            "thinking": True,
            "effort_profile": profile,
            "efforts": efforts,
            "reasoning_effort": efforts[0],
            "tools_text": "published",
        }
        alone = describe(tmp_path / "config.json")["chat"]["facts"]
        assert [fact["value"] for fact in alone][1] == "preview"


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "starts", "says"),
    [
        ([said("tool", "4")], "messages[0].role = 'tool'", "no call waits for a result"),
        ([HI, said("function", "4")], "messages[1].role = 'function'", "assistant, tool"),
        ([HI, said("assistent", "x")], "messages[1].role = 'assistent'", "is 'assistant'"),
        ([said("developer", "")], "messages[0].content", "a text"),
        ([HI, HELLO | {"tool_calls": [{}]}], "messages[1].tool_calls[0] = {}", "with a function"),
        ([SYSTEM | {"tools": [{}]}, HI], "messages[0].tools[0] = {}", "with a function"),
        ([SYSTEM | {"response_format": "json"}], "messages[0].response_format = 'j", "an object"),
        ([HI | {"response_format": {"a": 1}}], "messages[0].response_format", "of system and dev"),
        ([HI | {"tools": [{}]}], "messages[0].tools: of a", "accepted: of system and developer"),
        ([HI | {"tool_calls": [{}]}], "messages[0].tool_calls: of a", "accepted: of assistant"),
        ([HI | {"tool_call_id": "x"}], "messages[0].tool_call_id: of a", "accepted: of tool"),
        ([HI | {"content_blocks": [{}]}], "messages[0].content_blocks", "not rendered"),
        ([HI, HELLO | {"wo_eos": True}], "messages[1].wo_eos", "not rendered"),
        ([HI, HELLO | {"reasoning_content": 3}], "messages[1].reasoning_content = 3", "a text"),
        ([HI | {"task": "sing"}], "messages[0].task = 'sing'", "action, query"),
        ([HI | {"task": ["action"]}], "messages[0].task = ['action']", "or null"),
        ([HI, TWICE | {"task": "action"}], "messages[1].task", "no second one"),
        ([HI | {"task": "query"}, TWICE], "messages[0].task", "the last or before"),
        ([HI | {"task": "query"}, SYSTEM], "messages[0].task", "the last or before"),
        ([HELLO | {"task": "title"}, RULES], "messages[0].task", "the last or before"),
    ],
)  # fmt: skip
def test_refused_messages(
    messages: list[dict[str, Any]], starts: str, says: str, preview: Tokenizer
) -> None:
    for mode in MODES:
        with pytest.raises(UsageError) as caught:
            render_chat(preview, messages, **mode)
        assert str(caught.value).startswith(starts)
        assert says in str(caught.value)


def test_what_says_nothing_is_not_refused(preview: Tokenizer) -> None:
    empty = {"tools": None, "tool_calls": [], "response_format": None, "wo_eos": False,
             "task": None, "reasoning_content": None, "name": "x", "mask": 1}  # fmt: skip
    assert render_chat(preview, [HI | empty], tools=[]) == f"{B}{U}hi{A}{T}"


@pytest.mark.parametrize(
    ("arguments", "name", "says"),
    [
        ({"thinking": 1}, "thinking", "1; accepted: true or false"),
        ({"enable_thinking": "false"}, "enable_thinking", "true or false"),
        ({"drop_thinking": 0}, "drop_thinking", "true or false"),
        ({"thinking": True, "enable_thinking": False}, "thinking", "enable_thinking"),
        ({"thinking": True, "reasoning_effort": "none"}, "thinking", "reasoning_effort"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking", "effort"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "'low'; accepted: high, max, none"),
        ({"reasoning_effort": "low", "thinking": False}, "reasoning_effort", "high, max, none"),
        ({"reasoning_effort": ["max"]}, "reasoning_effort", "['max']"),
        ({"reasoning_effort": "xhigh", "effort_profile": "official"}, "reasoning_effort", "low, h"),
        ({"effort_profile": "its own"}, "effort_profile", "preview, official"),
        ({"effort_profile": {}}, "effort_profile", "{}; accepted"),
        ({"thinking_mode": "chat"}, "thinking_mode", "accepted: thinking, enable_thinking"),
        ({"bos_token": "x"}, "bos_token", "not known"),
    ],
)
def test_refused_arguments(
    arguments: dict[str, Any], name: str, says: str, preview: Tokenizer
) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat(preview, [HI], **arguments)
    assert str(caught.value).startswith(f"chat_template_kwargs.{name}: ")
    assert says in str(caught.value)


# -- through the server ------------------------------------------------------------------------

LIMITS = RequestLimits(models=("v4",), max_model_len=4000, vocab_size=290)


def asked(tokenizer: Tokenizer, *messages: dict[str, Any], **fields: Any) -> str:
    body = json.dumps({"messages": messages, **fields}).encode()
    return chat_prompt(read_chat(body, LIMITS), tokenizer, LIMITS)[0]


def test_served(preview: Tokenizer) -> None:
    assert asked(preview, HI) == f"{B}{U}hi{A}{T}"
    quiet = {"thinking": False}
    assert asked(preview, HI, chat_template_kwargs=quiet) == f"{B}{U}hi{A}{N}"
    goes_on = {"continue_final_message": True}
    assert asked(preview, HI, HELLO, **goes_on) == f"{B}{U}hi{A}{T}a greeting{N}hello"
    for messages, fields, param in (
        ([HI, said("tool", "x")], {}, "messages[1].role"),
        ([HI, HELLO | {"tool_calls": [1]}], {}, "messages[1].tool_calls[0]"),
        ([HI], {"reasoning_effort": "low"}, "chat_template_kwargs.reasoning_effort"),
    ):
        with pytest.raises(ApiError) as caught:
            asked(preview, *messages, chat_template_kwargs=fields)
        assert (caught.value.status, caught.value.param) == (400, param)


def test_an_evaluation_sees_whether_it_thinks(preview: Tokenizer) -> None:
    for thinking, answer in ((True, ""), (False, "4 or 5")):
        prompt = render_chat(preview, [HI], thinking=thinking)
        assert without_reasoning("4 or 5", prompt) == answer
