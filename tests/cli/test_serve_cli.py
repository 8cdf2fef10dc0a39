"""`trueline serve` before it serves: where options come from, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from trueline.cli import main
from trueline.config import EngineConfig
from trueline.server.config import ServerConfig
from trueline.server.keys import read_keys

Tiny = Callable[..., Path]


def serve(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *map(str, arguments)])
    return int(caught.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    assert serve("anything", "--print-config", *arguments) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_flag_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(
        'port = 1\nmax_num_seqs = 2\nseed = 3\nserved_model_name = ["a", "b"]\n'
        'enable_prefix_caching = false\nop = ["linear=torch_mm"]\n'
    )
    monkeypatch.setenv("TRUELINE_MAX_NUM_SEQS", "20")
    monkeypatch.setenv("TRUELINE_SEED", "30")
    told = printed(capsys, "--config", file, "--seed", "300")
    wanted = {"port": 1, "max_num_seqs": 20, "seed": 300, "served_model_name": ["a", "b"],
              "enable_prefix_caching": False, "op": ["linear=torch_mm"]}  # fmt: skip
    assert told | wanted == told
    again = tmp_path / "again.toml"
    again.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in told.items()))
    monkeypatch.delenv("TRUELINE_MAX_NUM_SEQS")
    monkeypatch.setenv("TRUELINE_CONFIG", str(again))
    monkeypatch.delenv("TRUELINE_SEED")
    assert printed(capsys) == told


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_json_files_and_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"max_model_len": 64, "gpu_memory_utilization": 0.5}')
    told = printed(capsys, "--config", file)
    assert (told["max_model_len"], told["gpu_memory_utilization"]) == (64, 0.5)
    assert told["host"] == ServerConfig().host == "127.0.0.1"
    assert told["max_logprobs"] == EngineConfig().max_logprobs


def test_numbers_with_a_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text('max_num_batched_tokens = "4k"\n')
    monkeypatch.setenv("TRUELINE_MAX_NUM_SEQS", "1K")
    flags = "--max-model-len 32K --kv-cache-memory-bytes 1.5G --block-size 0x40 --seed 2m"
    told = printed(capsys, "--config", file, *flags.split(), "--snapshot-spacing", "auto")
    wanted = {"max_num_batched_tokens": 4000, "max_num_seqs": 1024, "max_model_len": 32768,
              "kv_cache_memory_bytes": 3 << 29, "block_size": 64, "seed": 2_000_000,
              "snapshot_spacing": "auto"}  # fmt: skip
    assert told | wanted == told
    # of a text that may be anything, nothing is read into
    assert printed(capsys, "--served-model-name", "32K")["served_model_name"] == ["32K"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("max_num_seq = 1", "'max_num_seqs'"),
        ("port = [", "TOML"),
        ("port = 70000", "65535"),
        ("port = 'x'", "port"),
        ("max_num_queued = -1", "max_num_queued"),
        ("block_size = 0", "block_size"),
        ("on_engine_death = 'cry'", "on_engine_death"),
        ("print_config = 3", "print_config"),
    ],
)
def test_wrong_files(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    assert serve("anything", "--config", file) == 2
    told = capsys.readouterr()
    assert part.replace("_", "-") in told.err.replace("_", "-") + told.out.replace("_", "-")
    assert "Traceback" not in told.err


def test_wrong_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRUELINE_PORT", "eighty")
    assert serve("anything") == 2
    told = capsys.readouterr()
    assert "TRUELINE_PORT" in told.err + told.out


def test_a_misspelt_variable_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRUELINE_SERVICE_HOST", "10.0.0.1")  # as Kubernetes does
    assert printed(capsys)["host"] == "127.0.0.1"
    monkeypatch.setenv("TRUELINE_MAX_NUM_SEQ", "7")
    assert serve("anything", "--print-config") == 2
    assert "TRUELINE_MAX_NUM_SEQS" in capsys.readouterr().err


def test_dry_run_tells_the_plan(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(tiny("deepseek_v3"), "--dry-run", "--max-model-len", "100") == 0
    told = capsys.readouterr().out
    assert "sequences up to 100" in told
    assert "mla_decode" in told
    assert "188 bytes a token and layer" in told
    assert serve(tiny("deepseek_v3"), "--dry-run", "--kv-cache-dtype", "fp8") == 0
    assert "84 bytes a token and layer" in capsys.readouterr().out


def test_no_such_model_and_no_such_key_file(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(tmp_path / "nowhere") == 2
    assert "no such directory" in capsys.readouterr().err
    assert serve(tiny("deepseek_v3"), "--api-key-file", tmp_path / "none") == 2
    assert "api_key_file" in capsys.readouterr().err


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    keys = read_keys(("three",), file)
    for known in (b"Bearer one", b"bearer two", b"Bearer three", b"Bearer  one"):
        assert keys.admit(known), known
    for other in (None, b"", b"one", b"Basic one", b"Bearer", b"Bearer ", b"Bearer onetwo"):
        assert not keys.admit(other), other
    assert read_keys((), None).admit(None)


@pytest.mark.parametrize(
    "verb",
    ["serve", "generate", "inspect", "score", "make-tiny", "complete", "chat", "bench serve",
     "bench overhead", "bench gpu"],
)  # fmt: skip
def test_help_has_no_option_for_an_empty_list(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    told = capsys.readouterr().out
    assert "--" in told
    assert "--empty" not in told
