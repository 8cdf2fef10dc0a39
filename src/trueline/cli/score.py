"""`trueline score`: what the reference says of a text, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from cyclopts import Parameter

from trueline.cli.arguments import model_or_default, parse_facts
from trueline.cli.completion import MODEL
from trueline.cli.output import tables
from trueline.errors import UsageError
from trueline.models import read_model
from trueline.utils.builtin import SAMPLE_PROBLEM, builtin_model
from trueline.utils.hub import find_model
from trueline.utils.json_types import JSON
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.ledger import balance

if TYPE_CHECKING:
    from torch import Tensor

    from trueline.reference import Reference


Form = Literal["expanded", "absorbed"]


class TokenRow(TypedDict):
    """A token with its logprob and rank given the tokens before it; the first has none."""

    position: int
    id: int
    text: str
    logprob: float | None
    rank: int | None
    top: list[tuple[int, float]]


def score(
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    prompt: str | None = None,
    tokens: str | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] = "float64",
    form: Form = "expanded",
    start_position: int = 0,
    top: int = 3,
    fact: tuple[str, ...] = (),
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Print the exact logprob of every token of a prompt, computed by the reference.

    The reference is slow and plain on purpose: the whole sequence at once, no cache, its own
    reading of config.json and of the weights. It is what faster paths are measured against.

    Parameters
    ----------
    model
        A model directory, a built-in model, or a hub id (owner/name). Default: the
        built-in witness-v3.
    prompt
        Text to score; needs a tokenizer.json. A built-in model has a problem of its own to
        score where there is none.
    tokens
        Token ids to score instead of text, as 1,2,3.
    dtype
        Precision of the whole computation (rope tables stay float32, as in training).
    form
        What prefill does (latent attention expanded, linear attention in tiles), or what
        decode does (absorbed into the latent, token by token): the same numbers.
    start_position
        Position of the first token.
    top
        How many of the likeliest tokens to list at each position.
    fact
        Override a fact that published sources contradict each other on, as NAME=VALUE
        (known: latent_norm_eps, linear_layer_factor).
    as_json
        Print one JSON object.
    """
    name = model_or_default(model)
    if prompt is None and tokens is None and builtin_model(name):
        prompt = SAMPLE_PROBLEM
    if (prompt is None) == (tokens is None):
        raise UsageError("give one of --prompt and --tokens")
    if start_position < 0 or top < 0:
        raise UsageError("--start-position and --top take numbers from 0 up")
    overrides = parse_facts(fact)
    directory = find_model(name)
    _require_sound(directory, overrides)
    oracle = _reference(directory, dtype, overrides)
    ids, texts = _token_ids(directory, prompt, tokens, oracle.config.vocab_size)
    logprobs = _logprobs(oracle, ids, start_position, form)
    rows = [_row(i, ids, texts, logprobs, start_position, top) for i in range(len(ids))]
    total = sum(row["logprob"] or 0.0 for row in rows[1:])
    if as_json:
        head = {"model": name, "dtype": dtype, "form": form, "logprob": total}
        print(json.dumps(head | {"tokens": rows}, indent=1, ensure_ascii=False))
    else:
        _print_rows(rows, total)


def _require_sound(model: Path, overrides: JSON) -> None:
    """Checks config and files first, so that errors are ours: the reference takes them on trust."""
    spec = read_model(model, overrides)
    if spec.not_runnable:
        raise UsageError(f"{model}: {spec.family}: {spec.not_runnable}")
    checkpoint = open_checkpoint(model)
    if checkpoint is None:
        raise UsageError(f"{model}: no *.safetensors files to score with")
    balance(checkpoint, spec).require_balanced(checkpoint)


def _reference(model: Path, dtype: str, overrides: JSON) -> Reference:
    import torch

    from trueline import reference

    return reference.load(model, getattr(torch, dtype), **overrides)


def _logprobs(oracle: Reference, ids: list[int], start: int, form: Form) -> Tensor:
    import torch

    positions = torch.arange(start, start + len(ids))
    with torch.no_grad():
        return oracle.logprobs(torch.tensor(ids), positions, form=form)


def _token_ids(
    model: Path, prompt: str | None, tokens: str | None, vocab_size: int
) -> tuple[list[int], list[str]]:
    if tokens is not None:
        try:
            ids = [int(part) for part in tokens.split(",")]
        except ValueError:
            raise UsageError(f"--tokens {tokens}: accepted: token ids as 1,2,3") from None
        texts = [""] * len(ids)
    else:
        from trueline.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(model)
        ids = tokenizer.encode(prompt or "", add_special_tokens=False)
        texts = [tokenizer.token_text(token) for token in ids]
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad or not ids:
        found = f"token id {bad[0]}" if bad else "an empty prompt"
        raise UsageError(f"{found}: accepted: at least one token, ids from 0 to {vocab_size - 1}")
    return ids, texts


def _row(
    i: int, ids: list[int], texts: list[str], logprobs: Tensor, start: int, top: int
) -> TokenRow:
    row: TokenRow = {"position": start + i, "id": ids[i], "text": texts[i], "logprob": None,
                     "rank": None, "top": []}  # fmt: skip
    if i == 0:  # nothing comes before the first token
        return row
    given = logprobs[i - 1]
    chosen = given[ids[i]]
    best = given.topk(min(top, len(given)))
    row["logprob"], row["rank"] = float(chosen), 1 + int((given > chosen).sum())
    row["top"] = [(int(t), float(v)) for t, v in zip(best.indices, best.values, strict=True)]
    return row


def _print_rows(rows: list[TokenRow], total: float) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("position", "id", "token", "logprob", "rank", "likeliest", box=box.SIMPLE_HEAD)
    for row in rows:
        likeliest = "  ".join(f"{token}:{value:.4f}" for token, value in row["top"])
        logprob = "" if row["logprob"] is None else f"{row['logprob']:.7f}"
        cells = (row["position"], row["id"], row["text"], logprob, row["rank"] or "", likeliest)
        table.add_row(*(Text(str(cell)) for cell in cells))  # a token may look like markup
    console = tables()
    console.print(table)
    console.print(f"sum over {len(rows) - 1} tokens: {total:.7f}")
