"""Reads the files beside a vocabulary: special tokens, templates, end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trueline.errors import UsageError
from trueline.utils.json_types import JSON
from trueline.utils.model_files import (
    GENERATION,
    MORE_TEMPLATES,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER_CONFIG,
)


@dataclass(frozen=True)
class AddedToken:
    """An entry of added_tokens_decoder. Special ones can be left out of decoded text."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    named: Mapping[str, str]
    """bos_token, eos_token, … as templates see them."""
    more_special: tuple[str, ...]
    added: tuple[AddedToken, ...]
    add_bos: bool | None
    """None: the file does not say, so the vocabulary's own post-processor decides."""
    add_eos: bool | None
    generation_eos: tuple[int, ...]
    generation_config: JSON
    """generation_config.json; empty where there is none."""
    templates: Mapping[str, str]


def read_files(directory: Path) -> TokenizerFiles:
    config = read_object(directory / TOKENIZER_CONFIG)
    # the named tokens moved from the older file to the newer one, which wins
    older = read_object(directory / SPECIAL_TOKENS)
    tokens = older | {key: value for key, value in config.items() if value is not None}
    named = {
        key: content
        for key, value in tokens.items()
        if key.endswith("_token") and (content := _content(value)) is not None
    }
    more = [
        content
        for key in ("additional_special_tokens", "extra_special_tokens")
        for value in _items(tokens.get(key))
        if (content := _content(value)) is not None
    ]
    generation = read_object(directory / GENERATION)
    return TokenizerFiles(
        named=named,
        more_special=tuple(dict.fromkeys(more)),
        added=_added_tokens(directory / TOKENIZER_CONFIG, config),
        add_bos=_flag(directory, config, "add_bos_token"),
        add_eos=_flag(directory, config, "add_eos_token"),
        generation_eos=_generation_eos(directory / GENERATION, generation),
        generation_config=generation,
        templates=_templates(directory, config),
    )


def read_object(file: Path) -> JSON:
    """Empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: holds a {type(found).__name__}; accepted: a JSON object")
    return found


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []


def _content(value: object) -> str | None:
    """A token is written as its text, or as an object that has it under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _flag(directory: Path, config: Mapping[str, object], key: str) -> bool | None:
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return value
    raise UsageError(f"{directory / TOKENIZER_CONFIG}: {key} = {value!r}; accepted: true or false")


def _added_tokens(file: Path, config: Mapping[str, object]) -> tuple[AddedToken, ...]:
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, Mapping):
        raise UsageError(f"{file}: added_tokens_decoder is no object; accepted: id -> token")
    found = []
    for key, entry in table.items():
        content = _content(entry)
        if not str(key).isdecimal() or content is None:
            raise UsageError(
                f"{file}: added_tokens_decoder['{key}'] = {entry!r}; accepted: a token id and an "
                "object with its content"
            )
        flags = entry if isinstance(entry, Mapping) else {}
        found.append(
            AddedToken(
                id=int(key),
                content=content,
                special=bool(flags.get("special", False)),
                lstrip=bool(flags.get("lstrip", False)),
                rstrip=bool(flags.get("rstrip", False)),
                single_word=bool(flags.get("single_word", False)),
                normalized=bool(flags.get("normalized", False)),
            )
        )
    return tuple(sorted(found, key=lambda token: token.id))


def _generation_eos(file: Path, config: JSON) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise UsageError(f"{file}: eos_token_id = {value!r}; accepted: a token id or a list")
    return tuple(ids)


def _templates(directory: Path, config: Mapping[str, object]) -> dict[str, str]:
    """By name. Template files, where there are any, replace what tokenizer_config.json says."""
    files = {file.stem: file for file in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))}
    if (directory / TEMPLATE).is_file():
        files["default"] = directory / TEMPLATE
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    stored = config.get("chat_template")
    if stored is None:
        return {}
    if isinstance(stored, str):
        return {"default": stored}
    found = {}
    for entry in stored if isinstance(stored, list) else [stored]:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        template = entry.get("template") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise UsageError(
                f"{directory / TOKENIZER_CONFIG}: chat_template holds {str(entry)[:60]!r}; "
                "accepted: a template, or a list of objects with name and template"
            )
        found[name] = template
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise UsageError(f"{file}: cannot be read as text ({error})") from error
