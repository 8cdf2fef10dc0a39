"""From HTTP to the engine and back, in one process: every field arrives where it is meant for, and
limits are where they are said to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inside import Inside
from trueline.engine.executor import local_runner
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.params import SamplingParams, sequence_seed
from trueline.server.protocol.bodies import SAMPLING
from trueline.server.service import Generation, Times
from trueline.weights.checkpoint import open_checkpoint

Tiny = Callable[..., Path]
PROMPT = [3, 1, 4, 1, 5]
# of every sampling field another value than the default
VALUES: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": -0.3, "logit_bias": {"7": -1.5}, "seed": 11,
    "stop": ["end"], "stop_token_ids": [4], "include_stop_str_in_output": True,
    "ignore_eos": True, "max_tokens": 3, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 2,
    "bad_words": ["x"], "allowed_token_ids": [1, 2, 4, 7], "skip_special_tokens": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def inside(tiny: Tiny) -> Inside:
    return Inside(tiny("deepseek_v3"), max_model_len=128, max_num_seqs=4, max_num_queued=2)


@pytest.fixture
def asked(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> list[CoreRequest]:
    """What the engine is asked."""
    seen: list[CoreRequest] = []
    generate = inside.engine.generate

    def watched(requests: Any) -> Any:
        seen.extend(requests)
        return generate(requests)

    monkeypatch.setattr(inside.engine, "generate", watched)
    return seen


def ask(inside: Inside, **fields: Any) -> Any:
    heard = inside.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 2} | fields)
    assert heard.status == 200, heard.body
    return json.loads(heard.body)


def test_every_field_reaches_the_engine(inside: Inside, asked: list[CoreRequest]) -> None:
    assert set(VALUES) == set(SAMPLING)
    ask(inside, **VALUES, priority=-7, cache_salt="mine")
    plain = SamplingParams.from_mapping(VALUES)
    for index, request in enumerate(asked):
        wanted = msgspec.structs.replace(plain, n=1, seed=sequence_seed(11, index))
        assert request.params == wanted
        assert (request.prompt_token_ids, request.priority) == (PROMPT, -7)
        assert request.cache_salt == "mine"
        assert request.bad_word_ids
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("fields", "suffixes"),
    [
        ({}, [""]),
        ({"n": 2, "temperature": 1.0}, ["/0", "/1"]),
        ({"prompt": [PROMPT, PROMPT]}, ["-0", "-1"]),
        ({"prompt": [PROMPT] * 2, "n": 2, "temperature": 1.0}, ["-0/0", "-0/1", "-1/0", "-1/1"]),
    ],
)
def test_the_engine_knows_a_request_by_its_response_id(
    inside: Inside, asked: list[CoreRequest], fields: dict[str, Any], suffixes: list[str]
) -> None:
    """Whose errors then name what the client knows, whatever x-request-id it has sent."""
    response_id = ask(inside, **fields)["id"]
    assert [request.request_id for request in asked] == [response_id + each for each in suffixes]


def test_every_end_token_is_known_to_the_engine(
    inside: Inside, asked: list[CoreRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config's and the tokenizer's, which need not agree."""
    monkeypatch.setattr(inside.tokenizer, "eos_ids", (9, 17))
    ready = msgspec.structs.replace(inside.engine.ready, eos_token_ids=[5, 17])
    monkeypatch.setattr(inside.engine, "ready", ready)
    ask(inside)
    assert asked[0].eos_token_ids == [5, 9, 17]


@pytest.mark.parametrize("open_before", [0, 1, 5])
def test_room_is_for_as_many_as_said(
    inside: Inside, open_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 seats and 2 places in the queue."""
    monkeypatch.setattr(type(inside.engine), "num_open", open_before)
    room = 6 - open_before
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 1.0}
    assert inside.ask("/v1/completions", body | {"n": room}).status == 200
    over = inside.ask("/v1/completions", body | {"n": room + 1})
    assert over.status == (429 if open_before else 400)


def test_bodies_are_as_long_as_said(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    for length, status in ((len(body), 200), (len(body) - 1, 413)):
        config = replace(inside.service.config, max_body_bytes=length)
        monkeypatch.setattr(inside.service, "config", config)
        monkeypatch.setattr(inside.service.bodies, "limit", length)
        said = {"content-length": str(len(body))}
        for headers in ({}, said):
            assert inside.ask("/v1/completions", body, headers=headers).status == status


def test_times_are_those_between_tokens(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: 3 tokens at 2 s, 4 more at 8 s, the last with its end at 9 s."""
    clock = [0.0]
    monkeypatch.setattr("trueline.server.service.time.monotonic", lambda: clock[0])
    seen: list[tuple[int, str, float]] = []
    monkeypatch.setattr(inside.service.metrics, "observe", lambda *told: seen.append(told))
    generation = Generation(inside.service, [], [])
    times = Times(engine=3)
    for now, count, scheduled in ((2.0, 3, 0.5), (8.0, 4, None), (9.0, 1, None)):
        clock[0] = now
        output = CoreOutput(request_id="x", token_ids=[1] * count, first_scheduled=scheduled)
        generation._time(times, output)
    generation._ended(times, 8, "stop")
    found: dict[str, list[float]] = {}
    for engine, name, seconds in seen:
        assert engine == 3
        found.setdefault(name, []).append(seconds)
    assert found == {
        "time_to_first_token_seconds": [2.0],
        "inter_token_latency_seconds": [1.5] * 4 + [1.0],
        "e2e_request_latency_seconds": [9.0],
        "request_queue_time_seconds": [0.5],
        "request_prefill_time_seconds": [1.5],
        "request_inference_time_seconds": [8.5],
        "request_decode_time_seconds": [7.0],
        "request_time_per_output_token_seconds": [1.0],
    }


def test_metrics_tell_each_number_under_its_own_name(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number another one, so that none can stand in another's place."""
    names = inside.engine.stats.__struct_fields__
    numbers: dict[str, Any] = {name: 100 + place for place, name in enumerate(names)}
    numbers["step_counts"] = numbers["step_token_counts"] = []
    monkeypatch.setattr(inside.engine, "stats", type(inside.engine.stats)(**numbers))
    text = inside.ask("/metrics").body.decode()

    def shown(name: str) -> float:
        (line,) = (line for line in text.splitlines() if line.startswith(f"trueline:{name}{{"))
        return float(line.rpartition(" ")[2])

    for metric, source in {
        "num_requests_running": "num_running", "num_requests_waiting": "num_waiting",
        "prefix_cache_blocks": "num_blocks_cached", "prompt_tokens_total": "num_prompt_tokens",
        "generation_tokens_total": "num_generated_tokens",
        "prefix_cache_queries_total": "num_query_tokens",
        "prefix_cache_hits_total": "num_hit_tokens", "engine_steps_total": "num_steps",
        "num_preemptions_total": "num_preemptions", "corrupted_requests_total": "num_corrupted",
        "grammar_compilations_total": "num_grammars_compiled",
        "grammar_cache_hits_total": "num_grammar_hits",
        "grammar_compile_seconds_total": "grammar_seconds",
        "iteration_tokens_total_sum": "num_scheduled_tokens",
    }.items():  # fmt: skip
        assert shown(metric) == numbers[source], metric
    assert shown("kv_cache_usage_perc") == numbers["num_blocks_used"] / numbers["num_blocks"]
    assert shown("mamba_usage") == numbers["num_slots_used"] / numbers["num_slots"]


def samples(inside: Inside) -> dict[tuple[str, str], float]:
    """Of /metrics, by name and by the upper end of a bucket; each engine and model alike."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(inside.ask("/metrics").body.decode()):
        for name, labels, value, *_ in family.samples:
            key = name.removeprefix("trueline:"), labels.get("le", labels.get("kind", ""))
            found[key] = found.get(key, 0.0) + value
    return found


def test_histograms_tell_what_requests_were_and_did(inside: Inside) -> None:
    """Counts, sums and buckets of what was asked: two prompts of 5 and 7 tokens with n = 2, which
    draw 4 tokens each, and one without max_tokens, a chat, that ends by a stop."""
    before = samples(inside)
    more = {"ignore_eos": True, "temperature": 1.0}
    ask(inside, prompt=[PROMPT, [*PROMPT, 9, 2]], n=2, max_tokens=4, **more)
    chat = {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"7": 100.0}}
    heard = inside.ask("/v1/chat/completions", chat | {"stop_token_ids": [7]})
    usage = json.loads(heard.body)["usage"]
    assert usage["completion_tokens"] == 1
    after = samples(inside)
    now = {key: value - before.get(key, 0.0) for key, value in after.items()}
    prompts = [5, 5, 7, 7, usage["prompt_tokens"]]
    for name, values in {
        "request_prompt_tokens": prompts,
        "request_generation_tokens": [4, 4, 4, 4, 1],
        "request_max_num_generation_tokens": [4, 4, 1],
        "request_params_n": [2, 2, 1],
        "request_params_max_tokens": [4, 4, 4, 4],
    }.items():
        assert now[f"{name}_count", ""] == len(values), name
        assert now[f"{name}_sum", ""] == sum(values), name
        for (other, le), count in now.items():
            if other == f"{name}_bucket":
                assert count == sum(value <= float(le) for value in values), (name, le)
    assert now["request_inference_time_seconds_count", ""] == 5
    assert now["request_inference_time_seconds_sum", ""] == pytest.approx(
        now["request_prefill_time_seconds_sum", ""] + now["request_decode_time_seconds_sum", ""]
    )
    assert now["iteration_tokens_total_count", ""] == now["engine_steps_total", ""] > 0
    # every token but each sequence's last is computed, prompts that the cache holds excepted
    computed = sum(prompts) + 4 * 3 - now["prefix_cache_hits_total", ""]
    assert now["iteration_tokens_total_sum", ""] == computed


def test_memory_is_told_by_what_it_is_for(inside: Inside) -> None:
    found = samples(inside)
    told = {kind: size for (name, kind), size in found.items() if name == "memory_bytes"}
    runner = local_runner(inside.engine.core.executor)
    (blocks,) = runner.caches.paged.values()
    # canaries guard one more block, which is theirs
    held = sum(
        part.words.nbytes * (part.num_places - 1) / part.num_places for part in blocks.parts()
    )
    checkpoint = open_checkpoint(inside.tokenizer.directory)
    assert checkpoint is not None
    weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert told == {"weights": weights, "kv_cache": held}


def test_grammars_are_counted(inside: Inside) -> None:
    before = samples(inside)
    for choice in ("a", "b", "a", "a"):
        ask(inside, structured_outputs={"choice": [choice]})
    after = samples(inside)

    def grown(name: str) -> float:
        return after[name, ""] - before[name, ""]

    assert grown("grammar_compilations_total") == 2
    assert grown("grammar_cache_hits_total") == 2
    assert grown("grammar_compile_seconds_total") > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"guided_choice": ["xyz"], "allowed_token_ids": [3]},
         "guided_choice and allowed_token_ids"),
        ({"guided_choice": ["xyz"], "bad_words": ["y", "yz"]}, "guided_choice and bad_words"),
        ({"response_format": {"type": "json_object"}, "bad_words": ["{", '{"']},
         "response_format and bad_words"),
        ({"allowed_token_ids": [66], "bad_words": ["c"]}, "allowed_token_ids and bad_words"),
    ],
)  # fmt: skip
def test_fields_that_leave_no_token(
    inside: Inside, fields: dict[str, Any], told: str, stream: bool
) -> None:
    before = samples(inside)
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": stream} | fields
    heard = inside.ask("/v1/completions", body)
    begun = stream and heard.status == 200  # the first token was out
    last = json.loads(heard.body.split(b"data: ")[-1])["error"] if begun else heard.error
    assert begun or heard.status == 400
    assert f"no token is left that {told} allow together" in last["message"]
    assert last["type"] == "invalid_request_error"
    after, name = samples(inside), "corrupted_requests_total"
    assert after[name, ""] == before[name, ""]
    ask(inside)  # it goes on
