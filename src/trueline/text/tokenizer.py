"""A model's tokenizer: text to token ids and back, special tokens, end tokens, chat templates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from trueline.errors import UsageError
from trueline.text.encodings import ChatEncoding, find_encoding
from trueline.text.files import TokenizerFiles, read_files, read_object
from trueline.text.tiktoken_model import TiktokenVocabulary
from trueline.text.vocabulary import JsonVocabulary, Vocabulary
from trueline.utils.model_files import CONFIG, TEMPLATE, TIKTOKEN, TOKENIZER, TOKENIZER_CONFIG


class Tokenizer:
    """`special_ids` may be left out of decoded text; `eos_ids` end a sequence."""

    def __init__(self, directory: Path, vocabulary: Vocabulary, files: TokenizerFiles) -> None:
        self.directory = directory
        self.vocabulary = vocabulary
        self.special_tokens = files.named
        self.chat_templates = files.templates
        self.generation_config = files.generation_config
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")
        self.pad_id = self._named("pad_token", required=False)
        eos = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*eos, *files.generation_eos)))
        names = (*files.named.values(), *files.more_special)
        ids = (vocabulary.token_id(name) for name in names)
        self.special_ids = vocabulary.flagged | {token for token in ids if token is not None}
        # None: the vocabulary's post-processor decides
        self._ends = self._read_ends(files)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        directory = Path(directory)
        files = read_files(directory)
        special = (*files.named.values(), *files.more_special)
        vocabulary: Vocabulary
        if (directory / TOKENIZER).is_file():
            vocabulary = JsonVocabulary(directory / TOKENIZER, files.added, special)
        elif (directory / TIKTOKEN).is_file():
            vocabulary = TiktokenVocabulary(directory / TIKTOKEN, files.added, special)
        else:
            raise UsageError(
                f"{directory / TOKENIZER}: no such file; accepted: a {TOKENIZER}, a "
                f"{TIKTOKEN}, or token ids instead of text"
            )
        return cls(directory, vocabulary, files)

    def _named(self, key: str, *, required: bool = True) -> int | None:
        token = self.special_tokens.get(key)
        found = None if token is None else self.vocabulary.token_id(token)
        if required and token is not None and found is None:
            raise UsageError(
                f"{self.directory / TOKENIZER_CONFIG}: {key} = '{token}' is not in the "
                "vocabulary; accepted: one of its tokens, or null"
            )
        return found

    def _read_ends(self, files: TokenizerFiles) -> tuple[list[int], list[int]] | None:
        if files.add_bos is None and files.add_eos is None:
            return None
        ends: list[list[int]] = []
        for key, wanted, token in (
            ("bos", files.add_bos, self.bos_id),
            ("eos", files.add_eos, self.eos_id),
        ):
            if wanted and token is None:
                raise UsageError(
                    f"{self.directory / TOKENIZER_CONFIG}: add_{key}_token is true, but there is "
                    f"no {key}_token; name one, or set it to false"
                )
            ends.append([token] if wanted and token is not None else [])
        return ends[0], ends[1]

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's logits are often padded beyond it."""
        return self.vocabulary.size

    @property
    def sorts_tools(self) -> bool:
        """Kimi's own tokenizer sorts the keys of tools before its template sees them."""
        return isinstance(self.vocabulary, TiktokenVocabulary)

    def least_tokens(self, text: str) -> int:
        """A lower bound on its tokens, without encoding it; 0 where none is known."""
        longest = self.vocabulary.longest_bytes
        return 0 if longest is None else -(-len(text.encode("utf-8", "replace")) // longest)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: with the tokens this model wants around a text. A chat template
        writes them itself, so its text is encoded without. Other threads go on meanwhile."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text: character {error.start} is half of a surrogate pair; accepted: whole "
                "Unicode characters"
            ) from None
        if not add_special_tokens or self._ends is None:
            return self.vocabulary.encode(text, add_special_tokens)
        before, after = self._ends
        return [*before, *self.vocabulary.encode(text, False), *after]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Other threads go on meanwhile."""
        return self.vocabulary.decode(self.visible(ids, skip_special_tokens))

    def visible(self, ids: Iterable[int], skip_special_tokens: bool) -> list[int]:
        if skip_special_tokens:
            return [token for token in ids if token not in self.special_ids]
        return list(ids)

    def token_text(self, token: int) -> str:
        """What the token looks like in the middle of a text; U+FFFD for bytes that are no
        character by themselves (`token_bytes` has them)."""
        spelled = self.vocabulary.token_bytes(token)
        if spelled is not None:
            return spelled.decode("utf-8", "replace")
        head = self.vocabulary.decode(self.anchor)
        return self.vocabulary.decode([*self.anchor, token])[len(head) :]

    def token_bytes(self, token: int) -> bytes:
        spelled = self.vocabulary.token_bytes(token)
        return self.token_text(token).encode() if spelled is None else spelled

    @cached_property
    def anchor(self) -> list[int]:
        """A token with text of its own. Behind it, another one is not the first: a first piece
        may lose its leading space. Bytes need none."""
        if self.vocabulary.spells_bytes:
            return []
        for token in range(self.vocab_size):
            plain = token not in self.special_ids and self.vocabulary.token_bytes(token) is None
            if plain and self.vocabulary.decode([token]).strip():
                return [token]
        return []

    @property
    def has_chat_form(self) -> bool:
        return "default" in self.chat_templates or self.chat_encoding is not None

    @property
    def chat_encoding(self) -> ChatEncoding | None:
        """What makes prompts of chats where there is no template for them."""
        return None if "default" in self.chat_templates else self._encoding

    @cached_property
    def _encoding(self) -> ChatEncoding | None:
        found = find_encoding(read_object(self.directory / CONFIG), self.directory)
        return None if found is None else found.make(self.vocabulary, self.special_tokens)

    def chat_template(self, name: str | None = None, *, with_tools: bool = False) -> str:
        """The template of that name; without one, `tool_use` where tools are given and it is
        there, else `default`."""
        known = self.chat_templates
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in known else "default"
        if name not in known:
            accepted = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise UsageError(
                f"{self.directory}: no chat template '{name}' ({accepted}); accepted: a "
                f"chat_template in {TOKENIZER_CONFIG}, a {TEMPLATE}, or a prompt instead of "
                "messages"
            )
        return known[name]


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """The token sequences of words that must not be generated: each as it stands at the start of
    a text and after a space. Other spellings of the same letters stay possible."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                found[tuple(ids)] = None
    return [list(ids) for ids in found]
