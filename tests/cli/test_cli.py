"""The command line as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import published
from trueline import __version__, reference
from trueline.bench import formats as bench_formats
from trueline.bench.context import context_engine, pretend_computed
from trueline.bench.neighbours import start_neighbours
from trueline.cli.bench import comparison
from trueline.engine.params import SamplingParams
from trueline.utils.progress import human_bytes, human_count, progress_bar
from trueline.verify.cases import FP4, FP8_32

Tiny = Callable[..., Path]
WriteConfig = Callable[[dict[str, Any]], Path]
Run = Callable[..., tuple[int, str, str]]


# -- all verbs -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["32KB", "1.0001K", "0.3K", "1e", "2Q", "1KK"])
def test_numbers_with_a_suffix_that_are_none(run: Run, text: str) -> None:
    for verb in ("serve --max-model-len", "bench context witness-v3 --length", "chat --top-k"):
        code, _, err = run(*verb.split(), text)
        assert code == 2
        assert f"{verb.split()[-1]} {text}: accepted: a whole number, also as 32K (32,768)" in err


def test_version_and_help(run: Run) -> None:
    assert run("--version")[1].strip() == __version__
    code, out, _ = run("--help")
    assert code == 0
    for verb in ("generate", "inspect", "score", "make-tiny", "bench"):
        assert verb in out
        assert run(verb, "--help")[0] == 0


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trueline", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["inspect", "x", "y"],
        ["inspect", "x", "--colour"],
        ["make-tiny", "deepseek_v3"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], run: Run) -> None:
    assert run(*arguments)[0] == 2


def test_misspelt_verb_gets_a_hint(run: Run) -> None:
    _, out, err = run("inspekt")
    assert "inspect" in out + err


# -- inspect ---------------------------------------------------------------------------


def test_inspect_prints_facts_and_ledger(tiny: Tiny, run: Run) -> None:
    code, out, err = run("inspect", tiny("deepseek_v3"))
    assert code == 0
    assert err == ""
    for part in ("softmax_scale", "0.3301037", "ledger balanced", "layers 0-3", "layers 1-3"):
        assert part in out
    assert re.search(r"used exactly once +165", out)


def test_inspect_prints_what_is_stored_in_each_format(tiny: Tiny, run: Run) -> None:
    keys = {"hidden_size": 96, "moe_intermediate_size": 64}
    code, out, _ = run("inspect", tiny("deepseek_v3", keys=keys, storage=FP4))
    assert code == 0
    assert re.search(r"stored as +fp4 experts, block fp8", out)
    assert re.search(r"stored in +weights +parameters +size +bits a parameter", out)
    assert re.search(r"fp4 +108 +664 K +353 KB +4\.25 *\n +routed experts +108 ", out)
    assert re.search(r"block fp8 +32 .*\n +attention +20 ", out)


def test_inspect_json_has_every_fact_with_its_source(tiny: Tiny, run: Run) -> None:
    model = tiny("deepseek_v3")
    report = json.loads(run("inspect", model, "--json")[1])
    assert report["family"] == "deepseek_v3"
    assert report["runnable"] is True
    dense, moe = report["layer_kinds"]
    assert (dense["layers"], moe["layers"]) == ([0], [1, 2, 3])
    facts = {fact["name"]: fact for fact in dense["mixer"]["facts"]}
    assert facts["kv_lora_rank"] == {
        "name": "kv_lora_rank",
        "value": 37,
        "from": "key",
        "source": "kv_lora_rank",
    }
    assert facts["latent_norm_eps"]["from"] == "default"
    assert facts["softmax_scale"]["from"] == "formula"
    config = reference.read_config(model)
    wanted = reference.config.softmax_scale(config)
    assert facts["softmax_scale"]["value"] == pytest.approx(wanted, rel=1e-15)
    assert report["cache"] == [
        {
            "kind": "mla",
            "layers": 4,
            "bytes_per_token": 752,
            "state_bytes_per_sequence": 0,
            "fields": {"latent": 592, "rope_key": 160},
        }
    ]
    latents = {"storage": "e4m3fn", "group_size": 128, "bytes_per_token": 4 * 84}
    assert report["fp8_latents"] == latents
    stored = load_file(model / "model.safetensors")
    assert report["parameters"]["total"] == sum(value.numel() for value in stored.values())
    checkpoint = report["checkpoint"]
    assert checkpoint["balanced"] is True
    assert checkpoint["used"] == checkpoint["tensors"] == len(stored)


@pytest.mark.parametrize("name", published.ALL)
def test_inspect_works_on_a_config_alone(name: str, run: Run, write_config: WriteConfig) -> None:
    file = write_config(published.ALL[name])
    code, out, _ = run("inspect", file)
    assert code == 0
    assert "facts come from the config alone" in out
    if name == "V4-Flash":
        report = json.loads(run("inspect", file, "--json")[1])
        assert report["checkpoint"] is None
        assert report["runnable"] is True
    if name == "K2.5":
        assert "refused inputs: image, video" in out
        assert "quantization_config.ignore" in out


def test_inspect_shows_defaults_and_overrides(run: Run, write_config: WriteConfig) -> None:
    file = write_config(published.GLM_4_7_FLASH)
    _, out, _ = run("inspect", file, "--fact", "latent_norm_eps=1e-5")
    assert re.search(r"latent_norm_eps +1e-05 +override", out)
    assert run("inspect", file, "--fact", "latent_norm_eps")[0] == 2
    code, _, err = run("inspect", file, "--fact", "latent_eps=1")
    assert code == 2
    assert "latent_norm_eps" in err


def test_inspect_of_a_broken_checkpoint_is_exit_code_1(
    tiny: Tiny, run: Run, tmp_path: Path
) -> None:
    copy = tmp_path / "broken"
    shutil.copytree(tiny("deepseek_v3"), copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors")
    code, out, _ = run("inspect", copy)
    assert code == 1
    assert "missing: model.norm.weight" in out
    assert "ledger not balanced" in out


def test_inspect_reads_weights_and_finds_nan(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    code, out, _ = run("inspect", model, "--read-weights")
    assert code == 0
    assert "read 363,270 weights: all finite" in out
    copy = tmp_path / "nan"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"][1, 2] = float("nan")
    save_file(tensors, copy / "model.safetensors")
    code, out, _ = run("inspect", copy, "--read-weights")
    assert code == 1
    assert "NaN or Inf in model.layers.2.mlp.experts.5.up_proj.weight" in out


def test_errors_are_one_line_on_stderr(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("trueline: ")
    assert err.count("\n") == 1


# -- score -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_score_prints_the_reference(tiny: Tiny, run: Run, form: str) -> None:
    model = tiny("deepseek_v3")
    ids = [7, 301, 12, 12, 88]
    text = ",".join(map(str, ids))
    flags = ["--form", form, "--start-position", "100", "--json"]
    report = json.loads(run("score", model, "--tokens", text, *flags)[1])
    positions = torch.arange(100, 105)
    wanted = reference.load(model).logprobs(torch.tensor(ids), positions)
    assert report["tokens"][0]["logprob"] is None
    for i in range(1, 5):
        row = report["tokens"][i]
        assert row["position"] == 100 + i
        assert row["logprob"] == pytest.approx(float(wanted[i - 1, ids[i]]), abs=1e-12)
        assert row["rank"] == 1 + int((wanted[i - 1] > wanted[i - 1, ids[i]]).sum())
        assert row["top"][0][1] == pytest.approx(float(wanted[i - 1].max()), abs=1e-12)
    assert report["logprob"] == pytest.approx(sum(r["logprob"] for r in report["tokens"][1:]))


def test_score_takes_text(tiny: Tiny, run: Run) -> None:
    code, out, _ = run("score", tiny("kimi_k25"), "--prompt", "né")
    assert code == 0
    assert "sum over 2 tokens" in out  # n, and two bytes of é


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "one of --prompt and --tokens"),
        (["--tokens", "1,x"], "token ids as 1,2,3"),
        (["--tokens", "1,311"], "ids from 0 to 310"),
        (["--prompt", ""], "at least one token"),
    ],
)
def test_score_refuses(flags: list[str], part: str, tiny: Tiny, run: Run) -> None:
    code, _, err = run("score", tiny("deepseek_v3"), *flags)
    assert code == 2
    assert part in err


def test_score_without_tokenizer_or_model(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny("deepseek_v3"), copy)
    (copy / "tokenizer.json").unlink()
    assert "token ids instead" in run("score", copy, "--prompt", "x")[2]
    (copy / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in run("score", copy, "--prompt", "x")[2]
    assert "no such directory" in run("score", tmp_path / "nothing", "--tokens", "1")[2]


def test_score_takes_the_same_overrides(tiny: Tiny, run: Run) -> None:
    model = tiny("glm4_moe_lite")
    flags = ["--tokens", "1,2,3", "--json"]
    changed = json.loads(run("score", model, *flags, "--fact", "latent_norm_eps=1e-4")[1])
    wanted = reference.load(model, latent_norm_eps=1e-4).logprobs(torch.tensor([1, 2, 3]))
    assert changed["tokens"][2]["logprob"] == pytest.approx(float(wanted[1, 3]), abs=1e-12)
    assert changed["logprob"] != json.loads(run("score", model, *flags)[1])["logprob"]


def test_score_of_a_damaged_model(
    tiny: Tiny, run: Run, tmp_path: Path, write_config: WriteConfig
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(tiny("deepseek_v3"), copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = run("score", copy, "--tokens", "1,2")
    assert code == 2
    assert "truncated" in err
    empty = write_config(published.V4_FLASH).parent
    assert "no *.safetensors" in run("score", empty, "--tokens", "1")[2]


# -- generate and bench ------------------------------------------------------------------


def test_generate_prints_text_and_an_account(tiny: Tiny, run: Run) -> None:
    flags = ["--prompt", "Hello", "--prompt", "x", "--max-tokens", "5", "--temperature", "0"]
    code, out, err = run("generate", tiny("deepseek_v3"), *flags)
    assert code == 0
    assert out.startswith("> Hello\n")
    for part in ("deepseek_v3, 4 layers", "linear ", "cache ", "tokens/s", "if they are random"):
        assert part in err
    assert run("generate", tiny("deepseek_v3"), *flags, "--quiet")[2] == ""


def test_generate_json(tiny: Tiny, run: Run) -> None:
    flags = ["--prompt", "Hello", "--max-tokens", "4", "--seed", "7", "--n", "2", "--logprobs", "1"]
    _, out, _ = run("generate", tiny("deepseek_v3"), *flags, "--json", "--ignore-eos")
    report = json.loads(out)
    assert report["prompt"] == "Hello"
    assert [len(copy["token_ids"]) for copy in report["outputs"]] == [4, 4]
    assert len(report["outputs"][0]["logprobs"]) == 4
    again = json.loads(run("generate", tiny("deepseek_v3"), *flags, "--json", "--ignore-eos")[1])
    assert again == report


def test_generate_from_a_file_and_as_chat(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    flags = ["--max-tokens", "2", "--json", "--quiet"]
    out = run("generate", tiny("deepseek_v3"), "--prompts-file", file, *flags)[1]
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one", "two"]
    out = run("generate", tiny("deepseek_v3"), "--prompt", "hi", "--chat", *flags)[1]
    assert json.loads(out)["prompt"] == "<|begin|><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "--prompt or --prompts-file"),
        (["--prompt", "x", "--op", "linear"], "--op linear: accepted: KIND=NAME"),
        (["--prompt", "x", "--layer", "mla="], "--layer mla=: accepted: KIND=NAME"),
        (["--prompt", "x", "--layer", "mla=fast"], "no implementation 'fast'; accepted: trueline"),
        (["--prompt", "x", "--op", "linear=fast"], "accepted: native, onednn"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--kv-cache-dtype", "int8"], "kv_cache_dtype = 'int8': accepted"),
        (["--prompt", "x", "--numerics", "activations"], "has no weights in block fp8"),
        (["--prompt", "x", "--numerics", "fp8"], "numerics"),
        (
            ["--prompt", "x", "--numerics", "published"],
            "has none; accepted here: 'auto', 'weights'",
        ),
        (["--prompts-file", "/nowhere"], "not readable"),
    ],
)
def test_generate_refuses(flags: list[str], part: str, tiny: Tiny, run: Run) -> None:
    code, _, err = run("generate", tiny("deepseek_v3"), *flags)
    assert code == 2
    assert part in err


def test_generate_with_numerics(tiny: Tiny, run: Run) -> None:
    model = tiny("deepseek_v3", storage=FP8_32)
    flags = ["--prompt", "hi", "--max-tokens", "2", "--numerics", "activations"]
    code, _, err = run("generate", model, *flags)
    assert code == 0
    assert "numerics     activations: asked for" in err


def test_bench(tiny: Tiny, run: Run) -> None:
    flags = ["--prompt-len", "8", "--output-len", "4", "--json"]
    report = json.loads(run("bench", "throughput", tiny("deepseek_v3"), "--batch", "3", *flags)[1])
    assert report["trueline"]["batch"] == 3
    assert report["trueline"]["decode_tokens_per_s"] > 0
    code, out, _ = run("bench", "latency", tiny("deepseek_v3") / "config.json", "--repeats", "1",
                       "--kv-cache-dtype", "fp8", *flags[:4])  # fmt: skip
    assert code == 0
    assert "1 requests of 8 + 4 tokens" in out


def test_bench_formats(tiny: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bfloat16", "block-fp8", "fp4")
    wide = tiny("deepseek_v3", keys={"hidden_size": 96, "moe_intermediate_size": 64})
    flags = ["--batch", "2", "--rounds", "2", "--output-len", "3"]
    flags += [word for name in names for word in ("--format", name)]
    rows = json.loads(run("bench", "formats", wide, *flags, "--json")[1])
    assert [row["format"] for row in rows] == list(names)
    assert all(row["batch"] == 2 and len(row["rounds"]) == 2 for row in rows)
    code, out, _ = run("bench", "formats", wide, *flags)
    assert code == 0
    assert all(name in out for name in (*names, "over bfloat16"))
    monkeypatch.setattr(bench_formats, "MATRIX", (40, 64))
    code, out, err = run("bench", "formats", wide, *flags, "--gemm")
    if code == 0:
        assert out.count("block-fp8") == 1
    else:
        assert "no native kernels here" in err
    code, _, err = run("bench", "formats", wide, "--rounds", "0")
    assert code == 2
    assert "--rounds" in err


def test_bench_format_noise(tiny: Tiny, run: Run) -> None:
    """float32 is as near to float64 as it can be; activations in fp8 are not."""
    wide = tiny("deepseek_v3", keys={"hidden_size": 96, "moe_intermediate_size": 64})
    flags = ["--noise", "--prompts", "2"]
    rows = json.loads(run("bench", "formats", wide, *flags, "--json")[1])
    fp8, ue8m0 = "block-fp8", "block-fp8-ue8m0"
    assert [(row["format"], row["numerics"]) for row in rows] == [
        *((name, numerics) for name in (fp8, ue8m0) for numerics in ("weights", "activations")),
        ("int4", "weights"),
        ("fp4", "weights"),
        ("fp4", "activations"),
    ]
    for row in rows:
        assert row["positions"] == 128
        assert (row["mean_kl"] < 1e-10) == (row["numerics"] == "weights"), row
    code, out, _ = run("bench", "formats", wide, *flags, "--format", "int4")
    assert code == 0
    assert "100.0 % of 128" in out
    stored = tiny("deepseek_v3", storage=FP8_32)
    for model, told in ((stored, "has quantised weights"), ("mid", "has no weights")):
        code, _, err = run("bench", "formats", model, *flags)
        assert code == 2
        assert told in err
    assert run("bench", "formats", wide, "--noise", "--prompts", "0")[0] == 2


def test_bench_cache_noise(tiny: Tiny, run: Run) -> None:
    flags = ["--prompts", "2", "--prompt-len", "9"]
    found = json.loads(run("bench", "cache-noise", tiny("deepseek_v3"), *flags, "--json")[1])
    assert [each["token_bytes"] for each in found] == [84, 84, 84]  # 37 channels are one group
    assert all(each["positions"] == 18 and each["mean_kl"] > 0 for each in found)
    code, out, _ = run("bench", "cache-noise", tiny("deepseek_v3") / "config.json", *flags)
    assert code == 0
    assert "of 18" in out
    assert run("bench", "cache-noise", tiny("deepseek_v3"), "--prompts", "0")[0] == 2


def test_bench_neighbours(tiny: Tiny, run: Run) -> None:
    flags = ("--batch", "2", "--rounds", "2", "--seconds", "0.01", "--neighbours", "1")
    (row,) = json.loads(run("bench", "neighbours", tiny("deepseek_v3"), *flags, "--json")[1])
    assert (row["batch"], row["neighbours"], len(row["rounds"])) == (2, 1, 2)
    assert row["ratio"] == median(each["beside"] / each["alone"] for each in row["rounds"])
    code, out, err = run("bench", "neighbours", tiny("deepseek_v3"), *flags)
    assert code == 0
    assert "ratio" in out
    assert "2 requests" in err
    code, _, err = run("bench", "neighbours", tiny("deepseek_v3"), "--rounds", "0")
    assert code == 2
    assert "--rounds" in err


def test_neighbours_work_only_when_told() -> None:
    def states() -> list[str]:
        stats = (Path(f"/proc/{pid}/stat") for pid in pids)
        return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats if stat.exists()]

    with start_neighbours(3) as beside:
        pids = beside.processes
        assert len({os.getsid(pid) for pid in pids} - {os.getsid(0)}) == 1
        cores = sorted(os.sched_getaffinity(0))
        for i, pid in enumerate(pids):
            assert os.sched_getaffinity(pid) == {cores[i % len(cores)]}
        for _ in range(2):
            with beside.at_work():
                while "T" in states():  # stopped
                    pass
            while set(states()) != {"T"}:
                pass
    while set(states()) - {"Z"}:  # not one is left, but for what init has not collected yet
        pass


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5"])
def test_bench_context(family: str, tiny: Tiny, run: Run) -> None:
    flags = ["--length", "200", "--length", "40", "--batch", "2", "--steps", "4"]
    report = json.loads(run("bench", "context", tiny(family), *flags, "--json")[1])
    (name,) = report["decode"]
    short, long = report["decode"][name]
    assert report["prefill_tokens_per_s"][name] > 0
    assert (short["context"], long["context"]) == (40, 200)
    assert long["step_ms"] >= long["attention_ms"] > 0
    assert long["cpu_ms"] >= long["attention_cpu_ms"] > 0
    assert long["sequence_bytes"] > short["sequence_bytes"]
    state = family != "deepseek_v3"
    assert (long["sequence_bytes"] == long["all_latent_bytes"]) is not state
    code, out, _ = run("bench", "context", tiny(family), *flags)
    assert code == 0
    assert "all-latent MB" in out


def test_bench_context_beside_dense(tiny: Tiny, run: Run, tmp_path: Path) -> None:
    model, plot = tiny("deepseek_v32"), tmp_path / "plot.svg"
    flags = ["--length", "40", "--length", "200", "--batch", "2", "--steps", "4", "--beside-dense"]
    plots = ["--plot", plot, "--plot-cpu", tmp_path / "cpu.svg"]
    report = json.loads(run("bench", "context", model, *flags, *plots, "--json")[1])
    sparse, dense = report["decode"].values()
    assert list(report["decode"]) == [model.name, f"{model.name} dense"]
    assert [row["context"] for row in dense] == [40, 200]
    assert sparse[1]["sequence_bytes"] > dense[1]["sequence_bytes"]
    for at, unit in ((plot, "decode tokens/s"), (tmp_path / "cpu.svg", "ms of processor time")):
        assert f"<!-- {model.name} dense -->" in at.read_text()
        assert f"<!-- {unit}" in at.read_text()
    code, _, err = run("bench", "context", tiny("deepseek_v3"), *flags)
    assert code == 2
    assert "only deepseek_v32 has a dense counterpart" in err


def test_the_cache_of_bench_context_is_found(tiny: Tiny) -> None:
    """Or it would measure prefill."""
    found = {"deepseek_v3": 96, "bailing_moe_v2_5": 96, "deepseek_v32": 96, "deepseek_v4": 256}
    for family, num_cached in found.items():
        engine = context_engine(str(tiny(family)), [300], 1, 1)
        prompt = list(range(num_cached + 4))
        pretend_computed(engine, prompt)
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add_request("probe", {"prompt_token_ids": prompt}, params)
        (output,) = engine.step()
        assert output.num_cached_tokens == num_cached


def test_comparison_is_by_the_same_rule() -> None:
    work = {"batch": 8, "prompt_len": 128, "output_len": 65}
    ours = {"ready_s": 1.0, "results": [work | {"first_token_s": 1.0, "total_s": 3.0}]}
    theirs = {"ready_s": 2.0, "version": "x", "results": [{"first_token_s": 2.0, "total_s": 10.0}]}
    (row,) = comparison(["decode b8"], ours, ours, theirs, "peer")["rows"]
    assert row["trueline"] == 256
    assert row["peer"] == 64
    assert row["ratio"] == 4


# -- numbers for people ----------------------------------------------------------------


def test_human_numbers() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 31104, 671e9)] == [
        "0 B",
        "999 B",
        "1 KB",
        "31.1 KB",
        "671 GB",
    ]
    assert [human_count(n) for n in (12, 16.49771, 999.96, 363270, 15.7e9, 1.026e12)] == [
        "12",
        "16.5",
        "1000",
        "363 K",
        "15.7 B",
        "1.03 T",
    ]


def test_long_work_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trueline.utils.progress.SECONDS_BETWEEN_LINES", 0.0)
    with progress_bar("reading weights") as progress:
        progress(5_000_000, 20_000_000)
    assert re.match(r"reading weights: 25 % \(5 MB of 20 MB, .*B/s\)", capsys.readouterr().err)
