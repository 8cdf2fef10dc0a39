"""Tokenizers of models that think and call: the tiny one's bytes, a format's markers as tokens, and
a template that shows what it was given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from trueline.text.tokenizer import Tokenizer
from trueline.tiny.tokenizer import write_tokenizer

FIRST = 262
"""The id of the first marker."""
VOCAB = 300
END = 257
TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '[' + call.id + ' ' + call.function.name + ' ' }}"
    "{{ call.function.arguments if call.function.arguments is string else "
    "call.function.arguments | tojson }}{{ ']' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '<think>' if enable_thinking is not defined or enable_thinking else '</think>' }}"
    "{% endif %}"
)
"""`enable_thinking`, true by default; no efforts."""


def chat_tokenizer(
    directory: Path, markers: Sequence[str], *, special: bool = False, template: str = TEMPLATE
) -> Tokenizer:
    """`markers` are the tokens from `FIRST` on; `special`: text leaves them out."""
    directory.mkdir(exist_ok=True)
    write_tokenizer(directory, VOCAB, 256, [END])
    file = str(directory / "tokenizer.json")
    vocabulary = Vocabulary.from_file(file)
    tokens = [AddedToken(marker, special=special, normalized=False) for marker in markers]
    add = vocabulary.add_special_tokens if special else vocabulary.add_tokens
    add(tokens)
    assert [vocabulary.token_to_id(marker) for marker in markers] == [
        *range(FIRST, FIRST + len(markers))
    ]
    vocabulary.save(file)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return Tokenizer.load(directory)
