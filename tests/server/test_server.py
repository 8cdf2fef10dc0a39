"""The server as a team meets it: through the official client, a load balancer and Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from servers import Served, serving
from trueline import LLM, SamplingParams
from trueline.verify.engine import BAND

Tiny = Callable[..., Path]
KEY = "s3cret-of-the-test"
SECRET = "the words of a prompt"


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny("deepseek_v3"))


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Served]:
    flags = ("--served-model-name", "tiny", "--served-model-name", "other")
    more = ("--max-num-seqs", "8", "--max-num-queued", "4", "--max-body-bytes", "300000")
    with serving(tiny("deepseek_v3"), *flags, *more, TRUELINE_API_KEY=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> OpenAI:
    return server.client(KEY)


def joined(chunks: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Texts and finish reasons by choice, and usage, of a stream."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + text
            if choice.finish_reason:
                assert choice.index not in ends, "a choice ends once"
                ends[choice.index] = choice.finish_reason
    return texts, ends, usage


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "true to the", "temperature": 0},
    {"prompt": ["a line", "日本 of 🙂"], "temperature": 0, "max_tokens": 9},
    {"prompt": [3, 1, 4, 1, 5], "temperature": 0},
    {"prompt": [[3, 1, 4], [1, 5, 9]], "seed": 5, "n": 3, "temperature": 1.3},
    {"prompt": "x", "seed": 7, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"prompt": "x", "temperature": 0, "logit_bias": {"65": 100}},
    {"prompt": "echo", "temperature": 0, "echo": True},
    {"prompt": "x", "seed": 1, "extra_body": {"top_k": 5, "min_p": 0.01, "ignore_eos": True,
                                              "repetition_penalty": 1.2, "min_tokens": 3}},
    {"prompt": "x", "temperature": 0, "max_tokens": 40, "stop": ["e", "q"]},
]  # fmt: skip


@pytest.mark.parametrize("asked", COMPLETIONS, ids=lambda asked: str(asked)[:40])
def test_completions_are_those_of_llm(client: OpenAI, llm: LLM, asked: dict[str, Any]) -> None:
    whole = client.completions.create(model="tiny", **asked)
    given = asked | asked.get("extra_body", {})
    prompt = given.pop("prompt")
    given.pop("extra_body", None)
    echo = given.pop("echo", False)
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    forms = [p if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
    offline = llm.generate(forms, SamplingParams.from_mapping(given), use_tqdm=False)
    expected = [(o.prompt if echo else "") + c.text for o in offline for c in o.outputs]
    assert [choice.text for choice in whole.choices] == expected
    ends = [c.finish_reason for o in offline for c in o.outputs]
    assert [choice.finish_reason for choice in whole.choices] == ends
    stream = client.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **asked
    )
    texts, told, usage = joined(stream)
    assert [texts[i] for i in range(len(expected))] == expected
    assert [told[i] for i in range(len(expected))] == ends
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens == sum(len(c.token_ids) for o in offline for c in o.outputs)


def test_chat_is_that_of_llm(client: OpenAI, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    offline = llm.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    asked: dict[str, Any] = {"model": "other", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_completion_tokens=12)
    assert whole.choices[0].message.content == offline[0].outputs[0].text
    assert whole.usage.prompt_tokens == len(offline[0].prompt_token_ids)
    texts, _, _ = joined(client.chat.completions.create(**asked, max_tokens=12, stream=True))
    assert texts[0] == offline[0].outputs[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, tools=[{"type": "function"}])
    assert caught.value.param == "tools[0].function"


def test_logprobs_are_those_of_llm(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    offline = llm.generate("true to", params, use_tqdm=False)[0]
    asked: dict[str, Any] = {"model": "tiny", "prompt": "true to", "temperature": 0,
                             "max_tokens": 5, "logprobs": 3}  # fmt: skip
    more = {"prompt_logprobs": 2, "return_token_ids": True}
    whole = client.completions.create(**asked, extra_body=more).choices[0]
    wanted = [offline.outputs[0].logprobs[i][t].logprob
              for i, t in enumerate(offline.outputs[0].token_ids)]  # fmt: skip
    assert whole.logprobs.token_logprobs == pytest.approx(wanted, abs=BAND)
    assert whole.token_ids == offline.outputs[0].token_ids
    assert whole.prompt_token_ids == offline.prompt_token_ids
    assert len(whole.prompt_logprobs) == len(offline.prompt_token_ids)
    scored = client.completions.create(**asked | {"max_tokens": 0, "echo": True}).choices[0]
    told = zip(offline.prompt_logprobs[1:], offline.prompt_token_ids[1:], strict=True)
    own = [found[token].logprob for found, token in told]
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(own, abs=BAND)
    messages = [{"role": "user", "content": "hi"}]
    told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3,
                                          logprobs=True, top_logprobs=4)  # fmt: skip
    assert [len(each.top_logprobs) for each in told.choices[0].logprobs.content] == [4] * 3


def test_cached_tokens_and_salts(client: OpenAI) -> None:
    prompt = list(range(40, 90))

    def cached(**more: Any) -> int:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=more)
        return made.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() == 48
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine", priority=-3) == 48


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"


def test_the_rest_through_the_same_client(server: Served, llm: LLM) -> None:
    root = OpenAI(base_url=server.url, api_key=KEY, max_retries=0)
    told: Any = root.post("/tokenize", body={"prompt": "日本 🙂"}, cast_to=object)
    assert told["tokens"] == llm.get_tokenizer().encode("日本 🙂")
    back: Any = root.post("/detokenize", body={"tokens": told["tokens"]}, cast_to=object)
    assert back["prompt"] == "日本 🙂"
    states = {"/health": "ready", "/health/ready": "ready", "/health/live": "live"}
    for path, state in states.items():
        health: Any = root.get(path, cast_to=object)
        assert health["status"] == state, path
    for path, key in (("/version", "version"), ("/openapi.json", "paths")):
        found: Any = root.get(path, cast_to=object)
        assert found[key], path
    assert "trueline:num_requests_running" in root.get("/metrics", cast_to=str)


def test_errors_have_openais_shape_and_the_right_status(client: OpenAI, server: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    for path in ("/v1/models", "/tokenize", "/v1/nowhere"):
        assert server.get(path).status_code == 401, path
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="max_tokens") as wrong:
        client.completions.create(model="tiny", prompt="x", extra_body={"max_token": 1})
    assert wrong.value.param == "max_token"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="8191"):
        client.completions.create(model="tiny", prompt=[1] * 8192)
    client.completions.create(model="tiny", prompt="x", max_tokens=1, user="u",
                              extra_body={"metadata": {"a": "b"}, "store": False,
                                          "service_tier": "auto"})  # fmt: skip
    header = {"Authorization": f"Bearer {KEY}"}
    large = server.post("/v1/completions", content=b" " * 300_001, headers=header)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    chunks = (b" " * 100_000 for _ in range(4))  # nobody says how many
    assert server.post("/tokenize", content=chunks, headers=header).status_code == 413
    broken = server.post("/v1/completions", content=b'{"prompt": ', headers=header)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    assert server.get("/v1/completions", headers=header).status_code == 405
    assert server.get("/nowhere", headers=header).json()["error"]["message"]


def test_request_ids_come_back(server: Served) -> None:
    given = server.get("/version", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert len(server.get("/version").headers["x-request-id"]) == 32
    forged = server.get("/version", headers={"X-Request-Id": "a b"})
    assert forged.headers["x-request-id"] != "a b"


def test_the_queue_is_bounded(client: OpenAI, server: Served) -> None:
    def ask(_: int) -> int:
        body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True}
        answer = server.post("/v1/completions", json=body,
                             headers={"Authorization": f"Bearer {KEY}"})  # fmt: skip
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        return answer.status_code

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(ask, range(24)))
    assert set(found) == {200, 429}
    assert found.count(200) >= 12
    with pytest.raises(openai.BadRequestError, match="12"):
        client.completions.create(model="tiny", prompt="x", n=13)


def running(server: Served) -> float:
    return server.metric("trueline:num_requests_running")


def eventually(what: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_dropped(server: Served, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": stream, "n": 2}
    header = {"Authorization": f"Bearer {KEY}"}
    steps = server.metric("trueline:engine_steps_total")
    asked = httpx2.Client().stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=header,
        timeout=httpx2.Timeout(30.0 if stream else 0.5),
    )  # fmt: skip
    if stream:
        with asked as answer:
            lines = answer.iter_lines()  # kept: without it, the answer is closed
            assert next(lines).startswith("data: ")
            eventually(lambda: running(server) == 2)
    else:
        with pytest.raises(httpx2.TimeoutException):
            asked.__enter__()
    eventually(lambda: running(server) == 0)
    assert server.metric("trueline:kv_cache_usage_perc") == 0
    assert server.metric("trueline:engine_steps_total") < steps + 4000


def test_metrics_have_the_names_that_people_chart(client: OpenAI, server: Served) -> None:
    before = server.metric("trueline:generation_tokens_total")
    ask = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
    client.completions.create(model="tiny", prompt="x", **ask)
    eventually(lambda: server.metric("trueline:generation_tokens_total") == before + 6)
    text = server.get("/metrics").text
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "prompt_tokens_total", "num_preemptions_total",
                 "corrupted_requests_total", "late_kernels_total",
                 "canary_checks_total", "canary_hits_total", "cache_config_info",
                 "startup_time_seconds",
                 *(f"{each}_count" for each in (
                     "time_to_first_token_seconds", "inter_token_latency_seconds",
                     "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
                     "request_queue_time_seconds", "request_prefill_time_seconds",
                     "request_decode_time_seconds", "engine_step_seconds"))):  # fmt: skip
        assert f"trueline:{name}{{" in text, name
    assert server.metric("trueline:request_success_total") > 0


def test_logs_tell_ids_and_counts_but_no_text(tiny: Tiny, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother\n")
    flags = ("--log-format", "json", "--api-key-file", str(keys), "--metrics-prefix", "vllm")
    with serving(tiny("deepseek_v3"), *flags, wait=False) as served:
        served.wait_for('"ready"')
        client = served.client("another", default_headers={"X-Request-Id": "abc"})
        client.completions.create(model="deepseek_v3", prompt=SECRET, max_tokens=2)
        assert served.metric("vllm:prompt_tokens_total") > 0
        line = json.loads(served.wait_for('"abc"'))
        assert line | {"status": 200, "output_tokens": 2, "path": "/v1/completions"} == line
        served.process.terminate()
        assert served.ended() == 0
        log = served.rest_of_log()
    assert SECRET not in log
    assert KEY not in log
    assert "another" not in log
