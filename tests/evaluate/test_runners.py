"""The same items asked of the engine here and of servers, good and bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Served, serving
from stub_server import TEXT, Stub, stub_server
from trueline import LLM, SamplingParams
from trueline.client.endpoint import endpoint
from trueline.evaluate import server_runner
from trueline.evaluate.engine_runner import EngineRunner
from trueline.evaluate.items import Item
from trueline.evaluate.match import MATCHES
from trueline.evaluate.prompts import PromptFormat
from trueline.evaluate.run import Runner, evaluate, make_requests, run_requests
from trueline.evaluate.samples import Sample
from trueline.evaluate.server_runner import ServerRunner

Tiny = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
MATCH = {"exact": MATCHES["exact"]}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"}]
ITEMS = [
    *(Item(id=str(n), question="word " * (1 + 3 * n), answer="x") for n in range(6)),
    Item(id="chat", question=CHAT, answer="x"),
]
TEXTS = ITEMS[:-1]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
DRAWN = SamplingParams(temperature=1, max_tokens=12, seed=3, top_p=0.9, stop=["z"])


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    return tiny("deepseek_v3")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, batch_invariant=True)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serving(model, "--batch-invariant", "--max-num-seqs", "3") as served:
        yield served


@pytest.fixture(scope="module")
def running() -> Iterator[Stub]:
    with stub_server() as stub:
        yield stub


@pytest.fixture
def stub(running: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    for name in ("TRUELINE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server_runner, "LONGEST_WAIT", 0.001)
    running.models = ["whole"]
    running.bodies.clear()
    return running


def asked(runner: Runner, items: list[Item], form: PromptFormat, params: SamplingParams,
          samples: int = 1) -> list[Sample]:  # fmt: skip
    return run_requests(runner, make_requests(items, form, params, samples), MATCH).samples


def outcomes(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [
        (one.key, one.prompt_tokens, one.text, one.generated_tokens, one.finish_reason, one.error)
        for one in samples
    ]


CASES = [(True, GREEDY, 1), (True, DRAWN, 3), (False, GREEDY, 1), (False, DRAWN, 2)]


@pytest.mark.parametrize(("chat", "params", "samples"), CASES)
def test_engine_and_server_give_the_same(
    chat: bool, params: SamplingParams, samples: int, model: Path, llm: LLM, server: Served
) -> None:
    items, form = ITEMS if chat else TEXTS, PromptFormat(chat=chat)
    here = outcomes(asked(EngineRunner(llm), items, form, params, samples))
    assert all(error is None and tokens and count for _, tokens, _, count, _, error in here)
    assert len({text for _, _, text, *_ in here}) > len(items) // 2
    for concurrency in (1, 5):
        runner = ServerRunner(endpoint(server.url), model.name, concurrency)
        runner.model = server.get("/v1/models").json()["data"][0]["id"]
        assert outcomes(asked(runner, items, form, params, samples)) == here
    alone = EngineRunner(LLM(model, batch_invariant=True, max_num_seqs=1))
    assert outcomes(asked(alone, items, form, params, samples)) == here


def test_a_chat_is_rendered_as_llm_chat_does(llm: LLM) -> None:
    (found,) = asked(EngineRunner(llm), ITEMS[-1:], PromptFormat(chat=True), GREEDY)
    (output,) = llm.chat(CHAT, GREEDY)
    assert found.rendered_prompt == output.prompt
    assert found.prompt_tokens == len(output.prompt_token_ids)
    assert (found.text, found.prompt) == (output.outputs[0].text, CHAT)


def test_template_kwargs_reach_the_template(llm: LLM) -> None:
    plain, other = (
        asked(EngineRunner(llm, kwargs), ITEMS[-1:], PromptFormat(chat=True), GREEDY)[0]
        for kwargs in ({}, {"bos_token": "<<other>>"})
    )
    assert "<<other>>" in str(other.rendered_prompt)
    assert "<<other>>" not in str(plain.rendered_prompt)


def test_one_request_that_fails_does_not_stop_others(llm: LLM) -> None:
    items = [*TEXTS[:2], Item(id="long", question="w" * 100_000, answer="x"), *TEXTS[2:4]]
    found = asked(EngineRunner(llm), items, PromptFormat(chat=False), GREEDY)
    assert [each.item for each in found] == ["0", "1", "long", "2", "3"]
    assert [each.error is None for each in found] == [True, True, False, True, True]
    assert "tokens" in str(found[2].error)
    assert (found[2].finish_reason, found[2].right) == ("error", {"exact": False})


def test_an_interrupted_run_leaves_the_engine_usable(llm: LLM) -> None:
    class Stopped(BaseException):
        pass

    def stop(sample: Sample) -> None:
        raise Stopped

    form, short = PromptFormat(chat=False), SamplingParams(temperature=0, max_tokens=1)
    requests = make_requests(TEXTS[:1], form, short, 1) + make_requests(TEXTS[1:], form, GREEDY, 1)
    with pytest.raises(Stopped):
        run_requests(EngineRunner(llm), requests, MATCH, keep=stop)
    assert not llm.llm_engine.has_unfinished_requests()
    again = asked(EngineRunner(llm), TEXTS, PromptFormat(chat=False), GREEDY)
    assert [each.error for each in again] == [None] * len(TEXTS)


def test_in_process(llm: LLM) -> None:
    expected = llm.chat([{"role": "user", "content": str(TEXTS[0].question)}], GREEDY)[0].outputs[0]
    items = [Item(id="a", question=TEXTS[0].question, answer=expected.text), TEXTS[1]]
    found = evaluate(llm, items, GREEDY, matches=MATCH)
    assert [each.right["exact"] for each in found.samples] == [True, False]
    assert found.figures()["matches"]["exact"]["accuracy"] == 0.5
    assert found.generated_tokens == sum(each.generated_tokens for each in found.samples) > 0


# -- servers that fail -------------------------------------------------------------------------


def at(stub: Stub, model: str, **options: Any) -> ServerRunner:
    return ServerRunner(endpoint(stub.url, "sk-secret", **options), model, 4)


def test_what_is_sent(stub: Stub) -> None:
    runner = ServerRunner(endpoint(stub.url), "whole", 1, {"enable_thinking": False})
    found = asked(runner, ITEMS[:1], PromptFormat(chat=True), DRAWN, 2)
    asked(runner, ITEMS[:1], PromptFormat(chat=False), GREEDY)
    assert [each.text for each in found] == [TEXT] * 2
    first, second, text = stub.bodies
    question = {"role": "user", "content": ITEMS[0].question}
    assert first == {
        "model": "whole", "messages": [question], "temperature": 1.0, "max_tokens": 12,
        "top_p": 0.9, "stop": ["z"], "seed": first["seed"],
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert first["seed"] != second["seed"]
    assert text == {"model": "whole", "prompt": ITEMS[0].question, "temperature": 0.0,
                    "top_p": 1.0, "max_tokens": 12}  # fmt: skip


def test_a_busy_server_is_asked_again(stub: Stub) -> None:
    found = asked(at(stub, "flaky"), TEXTS, PromptFormat(chat=False), GREEDY)
    assert [each.error for each in found] == [None] * len(TEXTS)
    assert len(stub.bodies) > len(TEXTS)


@pytest.mark.parametrize("status", ["429", "503"])
def test_a_server_that_stays_busy(stub: Stub, status: str) -> None:
    found = asked(at(stub, status), TEXTS[:2], PromptFormat(chat=False), GREEDY)
    assert len(stub.bodies) == 2 * server_runner.ATTEMPTS
    assert all(str(each.error).startswith(f"HTTP {status}: {status}") for each in found)
    assert "sk-secret" not in str(found[0].error)


def test_a_refusal_is_not_asked_again(stub: Stub) -> None:
    found = asked(at(stub, "404"), TEXTS, PromptFormat(chat=True), GREEDY)
    assert len(stub.bodies) == len(TEXTS)
    assert "no such model" in str(found[0].error)


def test_a_slow_or_odd_answer_stops_no_other(stub: Stub) -> None:
    items = [*TEXTS[:1], Item(id="odd", question="odd", answer="x"), *TEXTS[1:]]
    found = asked(at(stub, "odd"), items, PromptFormat(chat=False), GREEDY)
    assert [each.item for each in found if each.error] == ["odd"]
    assert "an answer that is none" in str(found[1].error)
    late = asked(at(stub, "odd", timeout=0.2), items, PromptFormat(chat=False), GREEDY)
    assert [each.error for each in late if each.error] == ["timeout: no complete answer in 0.2 s"]


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_the_server_gave_up_is_an_error(stub: Stub, reason: str) -> None:
    found = asked(at(stub, f"ends:{reason}"), TEXTS[:2], PromptFormat(chat=True), GREEDY)
    said = f"not finished: the server ended it with '{reason}'"
    assert [each.error for each in found] == [said] * 2


def test_waits_are_the_server_s_or_grow() -> None:
    response = server_runner.WholeResponse()
    waits = [response.wait_seconds(attempt) for attempt in range(8)]
    assert all(0.5 * 2**n <= wait <= 0.625 * 2**n for n, wait in enumerate(waits[:6]))
    assert 30 <= waits[7] <= 37.5
    response.retry_after = "7"
    assert 7 <= response.wait_seconds(0) <= 8.75
    response.retry_after = "-1"
    assert response.wait_seconds(0) == 0
    for odd in ("nan", "Mon, 16 Nov 2026 12:00:00 GMT"):
        response.retry_after = odd
        assert 0.5 <= response.wait_seconds(0) <= 0.625


# -- the verb ----------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "items.jsonl"
    answers = ("x", TEXT) * 2
    rows = [
        {"prompt": "p" * (1 + 40 * n), "answer": answer, "c": "ab"[n // 2]}
        for n, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_eval_of_a_server(stub: Stub, data: Path, run: Run, tmp_path: Path) -> None:
    arguments = ("eval", stub.url, "--task", "jsonl", "--data", data, "--category-key", "c",
                 "--match", "exact", "--match", "contains", "--out", tmp_path / "out")  # fmt: skip
    code, out, err = run(*arguments, "--json")
    assert code == 0
    assert "jsonl: 4 items as chat, zero-shot" in err
    results = json.loads(out)
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["figures"]["matches"]["exact"]["accuracy"] == 0.5
    assert results["settings"]["model"] == {"name": "whole", "url": f"{stub.url}/v1"}
    code, out, err = run(*arguments)
    assert (code, len(stub.bodies)) == (0, 4)
    assert "4 samples are there" in err
    for words in (
        "all",
        "50.0%",
        "(15.0% – 85.0%)",
        "ended by: 4 stop",
        "12 prompt tokens, 36 gen",
    ):
        assert words in out, words
    assert run(*arguments, "--seed", "4")[0] == 2
    code, out, _ = run("eval", "diff", tmp_path / "out", tmp_path / "out", "--json")
    assert (code, json.loads(out)["both"], json.loads(out)["texts_differ"]) == (0, 2, 0)
    assert "0 of 4 texts differ" in run("eval", "diff", tmp_path / "out", tmp_path / "out")[1]


def test_only_what_is_given_is_sent_to_a_server(stub: Stub, data: Path, run: Run) -> None:
    arguments = ("eval", stub.url, "--task", "jsonl", "--data", data, "--limit", "1", "--json")
    sampling = json.loads(run(*arguments)[1])["settings"]["sampling"]
    assert not {"top_k", "min_p", "repetition_penalty"} & stub.bodies[0].keys()
    assert [sampling[name] for name in ("temperature", "top_p")] == [0, 1]
    assert [sampling[name] for name in ("top_k", "min_p", "repetition_penalty")] == [None] * 3
    sampling = json.loads(run(*arguments, "--top-k", "0", "--min-p", "0")[1])["settings"][
        "sampling"
    ]
    assert (stub.bodies[1]["top_k"], stub.bodies[1]["min_p"]) == (0, 0.0)
    assert (sampling["top_k"], sampling["min_p"]) == (0, 0.0)


def test_a_model_s_own_penalties_count_as_on_a_server(
    model: Path, data: Path, run: Run, tmp_path: Path
) -> None:
    own = tmp_path / "model"
    own.mkdir()
    for file in model.iterdir():
        (own / file.name).symlink_to(file)
    (own / "generation_config.json").unlink(missing_ok=True)
    recommended = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.5}
    (own / "generation_config.json").write_text(json.dumps(recommended))
    arguments = ("eval", own, "--task", "jsonl", "--data", data, "--max-tokens", "2", "--json")
    sampling = json.loads(run(*arguments)[1])["settings"]["sampling"]
    assert (sampling["temperature"], sampling["top_p"]) == (0, 1)
    assert (sampling["top_k"], sampling["repetition_penalty"]) == (20, 1.5)
    sampling = json.loads(run(*arguments, "--top-k", "0")[1])["settings"]["sampling"]
    assert (sampling["top_k"], sampling["repetition_penalty"]) == (0, 1.5)


def test_eval_fails_where_an_item_did(stub: Stub, data: Path, run: Run) -> None:
    stub.models = ["404"]
    address = stub.url.removeprefix("http://").removesuffix("/v1")  # as complete and chat take it
    code, out, _ = run("eval", address, "--task", "jsonl", "--data", data)
    assert code == 1
    assert "4 ended in error, and count as wrong; the first: HTTP 404: 404" in out


def test_eval_of_a_model(model: Path, data: Path, run: Run, tmp_path: Path) -> None:
    asked_for = (
        "eval",
        model,
        "--task",
        "jsonl",
        "--data",
        data,
        "--max-tokens",
        "4",
        "--batch-invariant",
    )
    for name, concurrency in (("a", 1), ("b", 4)):
        kept = ("--concurrency", concurrency, "--out", tmp_path / name)
        code, _, err = run(*asked_for, *kept)
        assert code == 0, err
    one, other = ((tmp_path / name / "samples.jsonl").read_bytes() for name in "ab")
    assert one == other
    code, out, _ = run(*asked_for, "--no-chat", "--samples", "2", "--temperature", "1", "--json")
    results = json.loads(out)
    assert any(line.startswith("device ") for line in results["plan"])
    assert (code, results["figures"]["samples"], results["settings"]["form"]) == (
        0,
        8,
        "completion",
    )


JSONL = ("--task", "jsonl", "--data", "DATA")
WRONG = [
    (("--task", "gsm8k"), "--task gsm8k needs --data FILE"),
    (("--task", "gsm8k", "--data", "DATA", "--match", "exact"), "--match is for --task jsonl"),
    (("--data", "DATA"), "--data is for --task gsm8k, aime or jsonl, not for stories"),
    ((*JSONL, "--fewshot-data", "DATA"), "--fewshot-data is for"),
    ((*JSONL, "--num-fewshot", "3"), "--num-fewshot needs"),
    ((*JSONL, "--no-chat", "--system", "s"), "--system is for a chat"),
    ((*JSONL, "--samples", "2"), "greedy choice gives the same"),
    (("--task", "jsonl", "--data", "CHATS", "--instruction", "i"), "sent as they are"),
    (("--task", "gsm8k", "--data", "GSM8K", "--fewshot-data", "GSM8K", "--num-fewshot", "1",
      "--instruction", "i"), "--instruction is for prompts without the examples"),
    ((*JSONL, "--concurrency", "0"), "--concurrency 0: accepted"),
    ((*JSONL, "--timeout", "5"), "--timeout is for a server"),
    ((*JSONL, "--concurrency", "2", "--max-num-seqs", "2"), "give one"),
    ((*JSONL, "--category", "a"), "none: no item has one"),
    ((*JSONL, "--prompt-key", "q"), "line 1: no key 'q'; it has: prompt"),
    ((*JSONL, "--temperature", "-1"), "temperature = -1.0: accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_input_is_named(
    arguments: tuple[str, ...], said: str, model: Path, data: Path, run: Run
) -> None:
    lines = {
        "CHATS": {"prompt": CHAT, "answer": "x"},
        "GSM8K": {"question": "q", "answer": "#### 1"},
    }
    files = {"DATA": str(data)}
    for name, line in lines.items():
        file = data.with_name(name)
        file.write_text(json.dumps(line))
        files[name] = str(file)
    given = [files.get(each, each) for each in arguments]
    code, _, err = run("eval", model, *given)
    assert code == 2
    assert said in err


def test_a_completion_on_a_server_needs_its_length(stub: Stub, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "aime.jsonl"
    file.write_text('{"problem": "p", "answer": 7}')
    code, _, err = run("eval", stub.url, "--task", "aime", "--data", file, "--no-chat")
    assert (code, stub.bodies) == (2, [])
    assert "give --max-tokens" in err
    assert run("eval", stub.url, "--task", "aime", "--data", file)[0] == 0
    assert "max_tokens" not in stub.bodies[0]


def test_stories_are_the_default(model: Path, run: Run) -> None:
    code, out, _ = run("eval", model, "--limit", "4", "--max-tokens", "8", "--json")
    results = json.loads(out)
    assert (code, results["settings"]["task"], results["figures"]["items"]) == (0, "stories", 4)
    assert len(results["figures"]["categories"]) == 4
    assert results["figures"]["finish_reasons"] == {"length": 4}


def test_a_server_is_evaluated_without_torch(stub: Stub, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    asked_for = ["eval", stub.url, "--limit", "4", "--out", out]
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom trueline.cli import main\n"
        f"for each in ({asked_for!r}, ['eval', 'diff', {out!r}, {out!r}]):\n"
        "    try: main(each)\n    except SystemExit as end: assert not end.code\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_engine_options_are_not_for_a_server(stub: Stub, data: Path, run: Run) -> None:
    code, _, err = run("eval", stub.url, "--task", "jsonl", "--data", data, "--batch-invariant")
    assert (code, stub.bodies) == (2, [])
    assert "--batch-invariant is for an engine here, and this is a server" in err
