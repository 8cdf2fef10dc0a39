"""Models by hub id, fetched from a stand-in of the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest

from hub_stub import Hub, asked_hub
from trueline.errors import ConfigError, UsageError
from trueline.models import read_model
from trueline.utils import hub_download, progress
from trueline.utils.environment import hub_cache
from trueline.utils.hub import find_config, find_model, hub_id, model_name

Tiny = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
NAME = "owner/name"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with asked_hub(tmp_path / "hub") as found:
        yield found


@pytest.fixture
def sharded(hub: Hub) -> dict[str, bytes]:
    """A repository with all that they have, most of it not for us."""
    other = "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": {"a": SHARD, "b": other}})
    files = {
        "config.json": b'{"model_type": "deepseek_v3"}', "tokenizer.json": b"{}",
        "model.safetensors.index.json": index.encode(),
        SHARD: os.urandom(300_000), other: os.urandom(100_000),
        "additional_chat_templates/tools.jinja": b"x",
        "encoding/encoding_dsv4.py": b"raise OSError",
        # not wanted
        "README.md": b"#", "modeling_deepseek.py": b"raise OSError", "pytorch_model.bin": b"\x80",
        "original/model.safetensors": b"other", "consolidated.safetensors": b"other",
        "encoding/test.py": b"", "figures/config.json": b"{}",
    }  # fmt: skip
    hub.repos[NAME] = hub.add(NAME, Path("/nonexistent"))
    hub.push(NAME, files)
    hub.repos[NAME].commits = {hub.repos[NAME].refs["main"]: files}
    return files


WANTED = {
    "config.json", "tokenizer.json", "model.safetensors.index.json", SHARD,
    "model-00002-of-00002.safetensors", "additional_chat_templates/tools.jinja",
    "encoding/encoding_dsv4.py",
}  # fmt: skip


def files_below(directory: Path) -> set[str]:
    return {str(f.relative_to(directory)) for f in directory.rglob("*") if f.is_file()}


def test_only_what_we_read_is_fetched_and_once(hub: Hub, sharded: dict[str, bytes]) -> None:
    directory = find_model(NAME, weights=False)
    assert files_below(directory) == {name for name in WANTED if not name.startswith("model-")}
    assert find_model(NAME) == directory
    assert files_below(directory) == WANTED
    assert all((directory / name).read_bytes() == sharded[name] for name in WANTED)
    assert sorted(hub.bodies()) == sorted(WANTED)
    hub.requests.clear()
    assert find_model(NAME) == directory
    assert hub.requests == [f"GET /api/models/{NAME}"]


def test_a_new_commit_is_found_and_brings_only_what_changed(
    hub: Hub, sharded: dict[str, bytes]
) -> None:
    before = find_model(NAME)
    hub.push(NAME, sharded | {"config.json": b'{"a": 1}'})
    hub.requests.clear()
    after = find_model(NAME)
    assert (before / "config.json").read_bytes() == sharded["config.json"]
    assert json.loads((after / "config.json").read_bytes()) == {"a": 1}
    assert hub.bodies() == ["config.json"]


def test_revisions(hub: Hub, sharded: dict[str, bytes]) -> None:
    commit = hub.repos[NAME].refs["main"]
    branch = hub.push(NAME, sharded | {"config.json": b"[]"}, "refs/pr/7")
    assert find_model(f"{NAME}@refs/pr/7").name == branch
    assert find_model(f"{NAME}@{commit}").name == find_model(f"{NAME}@main").name == commit
    with pytest.raises(
        UsageError, match=r"'owner/name@v9': .* no such revision; accepted: a branch"
    ):
        find_model(f"{NAME}@v9")


@pytest.mark.parametrize("reset", [False, True])
def test_a_lost_connection_is_made_again(
    hub: Hub, sharded: dict[str, bytes], reset: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.cut[SHARD] = [(100_000, reset), (50_000, reset)]
    directory = find_model(NAME)
    assert (directory / SHARD).read_bytes() == sharded[SHARD]
    assert capfd.readouterr().err.count("400 KB of weights to fetch, to") == 1
    pieces = [name.removeprefix(SHARD) for name in hub.bodies() if name.startswith(SHARD)]
    assert len(pieces) == 3
    if not reset:  # bytes that have come are not sent again
        assert pieces == ["", " bytes=100000-", " bytes=150000-"]


def test_what_is_complete_stays_after_an_end(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    directory = find_model(NAME, weights=False)
    os.unlink(directory / "tokenizer.json")  # a download that was interrupted
    monkeypatch.setattr(hub_download, "_fetch_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_model(NAME)
    monkeypatch.undo()
    with asked_hub(directory.parents[2]) as again:
        again.repos = hub.repos
        assert files_below(find_model(NAME)) == WANTED
        assert "config.json" not in again.bodies()


def test_an_interrupt_does_not_wait_for_files(hub: Hub, sharded: dict[str, bytes]) -> None:
    hub.pace[SHARD] = 0.3

    def interrupt() -> None:
        while not hub.sent[SHARD]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        find_model(NAME)
    assert hub.sent[SHARD] < len(sharded[SHARD])
    assert signal.getsignal(signal.SIGINT) is before
    hub.pace.clear()
    assert files_below(find_model(NAME)) == WANTED


def test_progress_is_told(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    find_model(NAME)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(f"{NAME}: 400 KB of weights to fetch, to ")
    lines = [line for line in lines if line.startswith("fetching weights: ")]
    percent = [int(line.split()[2]) for line in lines]
    assert percent == sorted(percent)
    assert percent[-1] == 100
    assert lines[-1].startswith("fetching weights: 100 % (400 KB of 400 KB, ")


def test_a_killed_download_goes_on(hub: Hub, sharded: dict[str, bytes], tmp_path: Path) -> None:
    """In a process of its own, whose environment names the hub and the cache."""
    second = "model-00002-of-00002.safetensors"
    hub.cut[SHARD] = [(1000, False)] * 20
    cache = tmp_path / "other"
    command = [sys.executable, "-c", "import sys; from trueline.utils.hub import find_model; "
               "print(find_model(sys.argv[1]))", NAME]  # fmt: skip
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    env.pop("HF_HUB_CACHE", None)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not {SHARD, second} <= {name.split()[0] for name in hub.bodies()}:
            assert process.poll() is None
        while not list(cache.glob(f"hub/models--owner--name/snapshots/*/{second}")):
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    hub.cut.clear()
    hub.requests.clear()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert files_below(Path(done.stdout.strip())) == WANTED
    assert hub.bodies() == [SHARD]
    offline = subprocess.run(
        command, env=env | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (offline.stdout, offline.stderr) == (done.stdout, "")


def test_refusals_say_what_to_do(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(UsageError) as caught:
            find_model(name)
        return str(caught.value)

    hub.repos["owner/gated"] = hub.add("owner/gated", Path("/nonexistent"), gated=True)
    hub.push("owner/gated", sharded)
    hub.repos["owner/private"] = hub.add("owner/private", Path("/nonexistent"), private=True)
    hub.push("owner/private", sharded)
    for name in ("owner/none", "owner/private"):
        assert refusal(name) == (
            f"model '{name}': not found on {hub.url}, or private (set HF_TOKEN to a token of yours)"
        )
    assert f"gated: ask for access on {hub.url}/owner/gated, and set HF_TOKEN" in refusal(
        "owner/gated"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the token (HF_TOKEN, or" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "not found" in refusal("owner/none")
    assert "the token sent is not enough" in refusal("owner/gated")
    assert files_below(find_model("owner/private")) == WANTED


def test_weights_that_we_do_not_read_are_refused(hub: Hub, sharded: dict[str, bytes]) -> None:
    hub.push(NAME, {"config.json": b"{}", "pytorch_model.bin": b"\x80"})
    with pytest.raises(UsageError, match=r"no \*\.safetensors beside its config; accepted"):
        find_model(NAME)
    index = json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode()
    hub.push(NAME, sharded | {"model.safetensors.index.json": index})
    with pytest.raises(UsageError, match=r"names gone\.safetensors, which it has not"):
        find_model(NAME)
    hub.push(NAME, {"config.json": b"{}", "b.safetensors": b"1", "a/c.safetensors": b"2"})
    assert files_below(find_model(NAME)) == {"config.json", "b.safetensors"}


def test_a_model_that_cannot_run_is_refused_before_its_weights_come(
    hub: Hub, sharded: dict[str, bytes]
) -> None:
    from trueline import LLM

    hub.push(NAME, sharded | {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(ConfigError, match="found 'llama'; accepted"):
        LLM(NAME)
    assert not any(name.startswith("model-") for name in hub.bodies())


def test_too_little_space_is_told_before(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**6, 10**6 - 399_999, 399_999)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(UsageError, match=r"400 KB to fetch, 400 KB free .* set HF_HUB_CACHE"):
            find_model(NAME)
    assert SHARD not in hub.bodies()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_download, "_fetch", full)
    with pytest.raises(UsageError, match=r"no space left in .*; make room"):
        find_model(NAME)


def test_without_the_hub_the_cache_is_taken_if_it_is_complete(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import _tree_cache, constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(UsageError, match=r"not in the local cache .*Connect"):
            find_model(NAME)
    directory = find_model(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UsageError, match=r"files are missing, and http.* did not give them .*[Oo]ffline"
    ):
        find_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    find_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert find_model(NAME) == directory
    shutil.rmtree(hub_cache() / "models--owner--name" / "trees")  # as older programs leave it
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    os.unlink(directory / SHARD)
    with pytest.raises(UsageError, match="files are missing, and"):
        find_model(NAME)
    assert hub.requests == []


def test_without_the_library_the_cache_is_taken(
    hub: Hub, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    directory = find_model(NAME)
    with monkeypatch.context() as patch:
        patch.delattr(huggingface_hub.HfApi, "resolve_revision")
        with pytest.raises(UsageError, match=r"newer huggingface_hub .* 'trueline\[hub\]'"):
            find_model(NAME)
    monkeypatch.setattr(hub_download, "find_spec", lambda _: None)
    hub.requests.clear()
    assert find_model(NAME) == directory
    with pytest.raises(UsageError, match=r"not in the local cache .*pip install 'trueline\[hub\]'"):
        find_model("owner/other")
    os.unlink(directory / SHARD)
    with pytest.raises(UsageError, match="1 of its files"):
        find_model(NAME)
    assert hub.requests == []


def test_paths_and_typos_ask_nobody(
    hub: Hub, sharded: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for name in (
        "witness-v33", "name", "./owner/name", "/owner/name", "~/name", "owner/name/", "a/b/c",
        "owner//name", "../name", "owner/..", "here/name", "owner/name@", "owner/na--me",
        "owner/name@../x", "owner /name", Path("owner/name"), "https://hub/owner/name",
    ):  # fmt: skip
        assert hub_id(name) is None, name
        with pytest.raises(UsageError, match="no such directory"):
            find_model(name)
    with pytest.raises(UsageError, match="so it is not looked for on a hub; hf://here/name is"):
        find_model("here/name")
    assert hub.requests == []
    (tmp_path / "owner").mkdir()
    assert find_model(f"hf://{NAME}", weights=False).is_dir()
    (tmp_path / "owner" / "name").mkdir()
    assert find_model(NAME) == Path(NAME)


def test_a_model_from_the_hub_is_the_model(hub: Hub, tiny: Tiny) -> None:
    for family in ("deepseek_v3", "deepseek_v4"):
        directory = tiny(family)
        hub.add(f"org/{family}", directory)
        found = find_model(f"org/{family}", check=read_model)
        assert read_model(found) == read_model(directory)
        wanted = {file.name for file in directory.iterdir() if file.is_file()}
        assert {file.name for file in found.iterdir()} == wanted
    assert find_config("org/deepseek_v3") == (find_model("org/deepseek_v3"), True)


def test_verbs_fetch_what_they_need(hub: Hub, tiny: Tiny, run: Run) -> None:
    hub.add("org/tiny", tiny("deepseek_v3"))
    for command in (("inspect", "org/tiny"), ("serve", "org/tiny", "--dry-run")):
        code, out, err = run(*command)
        assert (code, err) == (0, "")
        assert "deepseek_v3" in out
    assert "model.safetensors" not in hub.bodies()
    code, out, err = run("generate", "org/tiny", "--prompt", "x", "--max-tokens", "2", "--json")
    assert code == 0
    assert len(json.loads(out)["outputs"][0]["token_ids"]) == 2
    assert err.startswith("org/tiny: ")
    assert hub.bodies().count("model.safetensors") == 1
    code, _, err = run("generate", "org/none", "--prompt", "x")
    assert (code, err.count("\n")) == (2, 1)


def test_names_that_models_are_served_as() -> None:
    for model, name in (
        (NAME, "name"), (f"{NAME}@v1.0", "name"), (f"hf://{NAME}@main", "name"),
        ("witness-v3", "witness-v3"), ("some/path/model", "model"), ("./x@y", "x@y"),
    ):  # fmt: skip
        assert model_name(model) == name


@pytest.mark.parametrize(
    "env",
    [
        {}, {"XDG_CACHE_HOME": "/x"}, {"HF_HOME": "~/h"}, {"HF_HOME": "$HOME/h"},
        {"HF_HUB_CACHE": "~/c", "HF_HOME": "/h"}, {"HUGGINGFACE_HUB_CACHE": "/old"},
    ],
)  # fmt: skip
def test_the_cache_is_where_other_tools_have_it(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    program = "from huggingface_hub.constants import HF_HUB_CACHE as c; print(c)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert str(hub_cache()) == done.stdout.strip()
