"""Why a sequence has no token that it may draw, where it is what its request asks for: the names of
the fields that leave none together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from trueline.engine.masks import TokenMasks
from trueline.engine.messages import CoreRequest
from trueline.errors import RequestRejected
from trueline.grammar.guide import Guide
from trueline.ops.sampling import SamplingState


def no_token_left(state: SamplingState, vocab_size: int) -> str:
    """Empty where a token is left: what happened is not the request's doing."""
    left = {name: each for name, each in _by_field(state, vocab_size).items() if not each.all()}
    if not left or np.logical_and.reduce(list(left.values())).any():
        return ""
    for name in list(left):
        others = [each for other, each in left.items() if other != name]
        if others and not np.logical_and.reduce(others).any():
            del left[name]
    *most, last = left
    names = f"{', '.join(most)} and {last} allow together" if most else f"{last} allows"
    return f"no token is left that {names}"


def _by_field(state: SamplingState, vocab_size: int) -> dict[str, NDArray[np.bool_]]:
    """Which tokens each allows."""
    found: dict[str, NDArray[np.bool_]] = {}
    if isinstance(state.guide, Guide):
        mask = TokenMasks(vocab_size, torch.device("cpu")).of([state])
        if mask is not None:
            words = mask.words.numpy().view("uint8")[0]
            found[state.guide.name] = np.unpackbits(words, bitorder="little")[:vocab_size] != 0
    if (ids := state.params.allowed_token_ids) is not None:
        found["allowed_token_ids"] = _of(ids, vocab_size)
    found |= {name: ~_of(ids, vocab_size) for name, ids in state.forbidden().items()}
    return found


def _of(ids: object, vocab_size: int) -> NDArray[np.bool_]:
    found = np.zeros(vocab_size, dtype=np.bool_)
    chosen = np.array(list(ids), dtype=np.int64)  # type: ignore[call-overload]
    found[chosen[chosen < vocab_size]] = True  # an end token may be beyond what the model can say
    return found


def check_allowed(request: CoreRequest) -> None:
    """RequestRejected where the tokens that it may draw are all forbidden."""
    if (ids := request.params.allowed_token_ids) is not None:
        check_first_token(request, None, 1 + max(ids))


def check_first_token(request: CoreRequest, guide: Guide | None, vocab_size: int) -> None:
    """RequestRejected where the request could not even begin."""
    state = SamplingState(
        params=request.params,
        prompt_ids=request.prompt_token_ids,
        output_ids=[],
        position=len(request.prompt_token_ids),
        eos_ids=request.eos_token_ids,
        seed=0,
        bad_words=request.bad_word_ids,
        guide=guide,
    )
    problem = no_token_left(state, vocab_size) or (guide.problem if guide else "")
    if problem:
        raise RequestRejected(problem)
