"""Before anything runs: facts, the ledger of weights, text."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trueline.errors import CheckpointError, UsageError
from trueline.reference import weights as stored_names
from trueline.text.chat import render_chat
from trueline.text.detokenize import Detokenizer
from trueline.text.tokenizer import Tokenizer
from trueline.verify.cases import Subject
from trueline.verify.checks import one_spec
from trueline.verify.failed import CheckFailed
from trueline.verify.strict import refused
from trueline.verify.suite.forced import NotForced
from trueline.verify.suite.outcome import Outcome, Todo
from trueline.verify.suite.session import Session
from trueline.verify.suite.unusual import look, unusual
from trueline.weights.checkpoint import Checkpoint, open_checkpoint
from trueline.weights.ledger import Ledger, balance

ASCII = "".join(map(chr, range(32, 127)))
TEXTS = (
    ASCII,
    "The quick brown fox jumps over 13 lazy dogs.",
    "  leading and  double spaces\n\n\ttabs\r\n",
    "naïve café — “quotes” … 東京 🙂👩‍👩‍👧 עברית",
    "def f(x):\n    return x ** 2  # comment",
)
UTF_8 = {*range(0x80, 0xF5)} - {*b"\xc0\xc1"}
"""Bytes of characters beyond ASCII."""
CONVERSATION = [{"role": "user", "content": "How much is 2 + 2?"}]


def checks(session: Session) -> Iterator[Todo]:
    yield Todo(
        "preflight/facts",
        "one-spec",
        "every fact of config.json, read by the engine and again by the definition, is the same",
        lambda: _facts(session),
    )
    yield Todo(
        "preflight/ledger",
        "ledger",
        "every stored tensor is used once or unused by choice, every parameter is filled once",
        lambda: _ledger(session),
    )
    yield Todo(
        "preflight/strict",
        "strict",
        "what nobody reads is refused: a config key, a tensor too many, too few or transposed, an "
        "exempt weight in codes",
        lambda: Outcome(f"{refused(session.model, dict(session.config.facts))} refused"),
    )
    yield Todo(
        "preflight/weights",
        "ledger",
        "stored weights beside those of other layers: what is unusual is told, and fails nothing",
        lambda: _weights(session),
    )
    yield Todo(
        "preflight/tokenizer",
        "golden text",
        "text to tokens and back, whole and token by token, gives the same text",
        lambda: _tokenizer(session),
    )
    yield Todo(
        "preflight/chat template",
        "golden text",
        "a conversation is rendered, and its tokens stand for what was rendered",
        lambda: _template(session),
    )


def _facts(session: Session) -> Outcome:
    nothing = torch.empty(0, dtype=torch.long)
    one_spec(Subject(session.name, session.model, nothing, nothing, dict(session.config.facts)))
    return Outcome(f"{session.spec.num_layers} layers of {session.spec.family}")


def _ledger(session: Session) -> Outcome:
    checkpoint = open_checkpoint(session.model)
    if checkpoint is None:
        raise NotForced("there are no weights: config.json alone")
    ledger = balance(checkpoint, session.spec)
    try:
        ledger.require_balanced(checkpoint)
    except CheckpointError as error:
        raise CheckFailed(str(error)) from error
    _same_names(session, checkpoint, ledger)
    unused = sum(map(len, ledger.unused.values()))
    return Outcome(f"{len(ledger.uses)} tensors used, {unused} unused by choice")


def _same_names(session: Session, checkpoint: Checkpoint, ledger: Ledger) -> None:
    """What the definition takes for its own is what the engine uses, and the other way round."""
    config = session.definition.config
    ours = {tensor.name for use in ledger.uses for tensor in use.tensors}
    theirs = {
        name
        for name in checkpoint.tensors
        if not stored_names.is_foreign(stored_names.renamed(name, config), config)
    }
    for name in sorted(ours ^ theirs):
        if not (
            config.tie_word_embeddings and stored_names.renamed(name, config) == "lm_head.weight"
        ):
            raise CheckFailed(
                f"{name} is {'' if name in ours else 'not '}the engine's, and "
                f"{'' if name in theirs else 'not '}the definition's"
            )


def _weights(session: Session) -> Outcome:
    checkpoint = open_checkpoint(session.model)
    if checkpoint is None:
        raise NotForced("there are no weights: config.json alone")
    found = look(balance(checkpoint, session.spec).uses)
    told = unusual(found)
    return Outcome(f"{len(found)} weights, {len(told)} of them unusual", unusual=told)


def _load(session: Session) -> Tokenizer:
    try:
        return Tokenizer.load(session.model)
    except UsageError as error:
        raise NotForced(str(error)) from error


def _tokenizer(session: Session) -> Outcome:
    tokenizer = _load(session)
    vocab, tokens = session.spec.vocab.total, 0
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens += len(ids)
        if beyond := [token for token in ids if not 0 <= token < vocab]:
            raise CheckFailed(f"{text!r}: token {beyond[0]}, of a vocabulary of {vocab}")
        whole = tokenizer.decode(ids, True)
        if text == ASCII and (lost := sorted(set(text) - set(whole))):
            raise CheckFailed(f"{text!r} comes back without {''.join(lost)!r}: no token has it")
        stream = Detokenizer(tokenizer, skip_special_tokens=True)
        pieces = "".join(stream.push([token]) for token in ids) + stream.flush()
        if pieces != whole:
            raise CheckFailed(f"{text!r}: streamed {pieces!r}, whole {whole!r}")
        again = tokenizer.encode(whole, add_special_tokens=False)
        if again != ids and tokenizer.decode(again, True) != whole:
            raise CheckFailed(f"{text!r}: decodes to {whole!r}, and that to other text")
    if lost_bytes := _bytes_without_a_token(tokenizer):
        raise CheckFailed(
            f"no token has the bytes {lost_bytes}: characters of other languages lose them"
        )
    return Outcome(f"{len(TEXTS)} texts of {tokens} tokens")


def _bytes_without_a_token(tokenizer: Tokenizer) -> str:
    vocabulary = tokenizer.vocabulary
    if not vocabulary.spells_bytes:
        return ""
    spelt = (vocabulary.token_bytes(token) for token in range(vocabulary.size))
    alone = {each[0] for each in spelt if each is not None and len(each) == 1}
    return ", ".join(f"0x{byte:02X}" for byte in sorted(UTF_8 - alone))


def _template(session: Session) -> Outcome:
    tokenizer = _load(session)
    if not tokenizer.has_chat_form:
        raise NotForced("the model has no chat template")
    text = render_chat(tokenizer, CONVERSATION)
    if CONVERSATION[0]["content"] not in text:
        raise CheckFailed(f"the question is not in what was rendered: {text[:200]!r}")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids or max(ids) >= session.spec.vocab.total:
        raise CheckFailed(f"{len(ids)} tokens, the largest {max(ids, default=None)}")
    return Outcome(f"{len(text)} characters, {len(ids)} tokens")
