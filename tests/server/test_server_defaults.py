"""Defaults that depend on what is asked, and counts that land in their own bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from trueline.server.process.messages import STEP_BUCKETS
from trueline.server.process.stats import StatsRecorder
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.requests import (
    GenerateRequest,
    read_chat,
    read_completion,
    read_tokenize,
)

LIMITS = RequestLimits(models=("m",), max_model_len=100, vocab_size=300)
PROMPT = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("body", "special"),
    [
        (PROMPT, True),
        (CHAT, False),  # a template writes its own
        *(
            (PROMPT | {"add_special_tokens": said}, said is not False)
            for said in (True, False, None)
        ),
        *((CHAT | {"add_special_tokens": said}, said is True) for said in (True, False, None)),
    ],
)
def test_special_tokens_around_texts_but_not_around_chats(
    body: dict[str, object], special: bool
) -> None:
    assert read_tokenize(json.dumps(body).encode(), LIMITS).add_special_tokens is special


@pytest.mark.parametrize(("read", "body"), [(read_completion, PROMPT), (read_chat, CHAT)])
def test_the_sampling_that_the_model_recommends(
    read: Callable[[bytes, RequestLimits], GenerateRequest], body: dict[str, object]
) -> None:
    limits = msgspec.structs.replace(LIMITS, default_params={"temperature": 0.0, "top_p": 0.9})
    params = read(json.dumps(body | {"top_p": 0.5}).encode(), limits).params
    assert (params.temperature, params.top_p) == (0.0, 0.5)
    params = read(json.dumps(body | {"temperature": 0.7, "top_p": None}).encode(), limits).params
    assert (params.temperature, params.top_p) == (0.7, 0.9)


@pytest.mark.parametrize("usage", [True, False, None])
@pytest.mark.parametrize("continuous", [True, False, None])
def test_usage_in_every_chunk_only_where_there_is_usage(
    usage: bool | None, continuous: bool | None
) -> None:
    options = {"include_usage": usage, "continuous_usage_stats": continuous}
    body = PROMPT | {"stream": True, "stream_options": options}
    read = read_completion(json.dumps(body).encode(), LIMITS)
    assert read.include_usage is bool(usage)
    assert read.continuous_usage is bool(usage and continuous)


def test_every_step_is_counted_in_its_bucket() -> None:
    """Up to and including the bound, as Prometheus has it; longer ones in the last."""
    counters = SimpleNamespace(num_steps=0, num_scheduled_tokens=0)
    core = SimpleNamespace(scheduler=SimpleNamespace(counters=counters))
    for number, bound in enumerate(STEP_BUCKETS):
        for seconds, place in (
            (bound * 0.999, number),
            (bound, number),
            (bound * 1.001, number + 1),
        ):
            stats = StatsRecorder(core)  # type: ignore[arg-type]
            stats.stepped(seconds, [])
            assert [i for i, count in enumerate(stats.step_counts) if count] == [place]
            assert stats.step_seconds == stats.last_step_seconds == seconds
