"""An installed wheel: its data is in it, and nothing looks for a checkout."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from environments import install, python_with
from paths import CONFIGS, RESULTS, ROOT
from servers import serving
from trueline.utils.builtin import BUILTIN_MODELS

ASKED = "Tom has 3 apples and buys 4 more. How many apples does he have?"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-deps", "--no-index")
KERNELS = ("attention", "experts", "lightning", "selection")
ON_A_GPU = [*(f"gpu.kernels.{name}" for name in KERNELS), "gpu.warmup", "peers.transformers"]
"""Benchmarks that run there only: elsewhere, whatever they import from the engine is there."""


@pytest.fixture(scope="module")
def held() -> dict[str, Path]:
    """What a wheel would hold: name in it -> file."""
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    return {file.distribution_path: Path(file.path) for file in files}


@pytest.fixture(scope="module")
def installed(held: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that and nothing else. Linked, since the built-in models are large; a module
    would be found where its link leads."""
    site = tmp_path_factory.mktemp("site")
    for name, file in held.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".safetensors":
            (site / name).symlink_to(file)
        else:
            shutil.copyfile(file, site / name)
    return site


@pytest.fixture(scope="module")
def built(held: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel itself."""
    made = tmp_path_factory.mktemp("wheel")
    build = (*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(made), str(ROOT))
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = made.glob("trueline-*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == held.keys()
    return wheel


@pytest.fixture(scope="module")
def from_wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("from_wheel")
    subprocess.run((*PIP, "install", *OFFLINE, "--target", str(site), str(built)), check=True)
    return site


def run(site: Path, at: Path, *arguments: str) -> str:
    """A command of the installed package, outside the repository."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=at, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_holds_what_is_read(held: dict[str, Path]) -> None:
    assert {f"trueline/bench/gpu/{name}" for name in ("cells.json", "peers-h200.json")} <= set(held)
    names = {path.parent.name for path in CONFIGS.glob("*/config.json")}
    assert names >= {"mid", "v2lite", "v4s", "deepseek-v3"}
    assert {f"trueline/bench/configs/{name}/config.json" for name in names} <= set(held)
    assert not [name for name in held if not name.startswith("trueline/")]
    for folder, files in (
        ("native", {"kernels.cpp", "sparse.cpp", "pool.cpp", "attention.h", "weights.h"}),
        ("server/page", {"index.html", "style.css", "app.js", "icon.svg"}),
    ):
        assert {f"trueline/{folder}/{file}" for file in files} <= set(held)
    # and whatever else stands beside the sources
    tracked = subprocess.check_output(("git", "ls-files", "src"), cwd=ROOT, text=True).splitlines()
    assert {name.removeprefix("src/") for name in tracked} == set(held)
    for model in BUILTIN_MODELS:
        for file in ("config.json", "model.safetensors", "tokenizer.json", "training.jsonl"):
            assert f"trueline/witness/models/{model}/{file}" in held


def test_commands_without_a_model(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import trueline; print(trueline.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    told = run(installed, tmp_path, "-m", "trueline", "bench", "compare", "--help")
    assert "--peer" in told
    recorded = str(RESULTS / "gpu-h200.json")
    told = run(installed, tmp_path, "-m", "trueline", "bench", "gpu", "--recorded", recorded)
    assert "v2lite B=1" in told


@pytest.mark.slow
def test_a_wheel_serves_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    """With what it says it needs and nothing else, at the pinned versions."""
    pins = ROOT / "constraints.txt"
    requirement, pinned = f"{built}[server,hub]", ("--constraint", str(pins))
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = needs["optional-dependencies"]
    wanted = [*needs["dependencies"], *extras["server"], *extras["hub"]]
    python = python_with("wheel", wanted, *pinned, made_from=[pins])
    install(python, *pinned, "--force-reinstall", "--no-deps", requirement)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    with serving("witness-v3", program=[str(python), "-I"], at=tmp_path) as served:
        page = served.get("/")
        assert page.headers["content-type"].startswith("text/html")
        linked = re.findall(r'(?:src|href)="(/?[\w/.-]+)"', page.text)
        assert {Path(name).suffix for name in linked} >= {".js", ".css"}
        for name in linked:
            assert served.get(f"/{name.lstrip('/')}").status_code == 200
        body = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0}
        reply = served.post("/v1/chat/completions", json={"model": "witness-v3", **body})
        assert "#### 7" in reply.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_a_wheel_answers(from_wheel: Path, tmp_path: Path) -> None:
    asked = ("generate", "--prompt", ASKED)
    assert "#### 7" in run(from_wheel, tmp_path, "-m", "trueline", *asked)


@pytest.mark.slow
def test_a_tiny_model_is_measured(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "-m", "trueline", "make-tiny", "deepseek_v3", "model")
    work = ("--batch", "2", "--prompt-len", "8", "--output-len", "4")
    told = run(installed, tmp_path, "-m", "trueline", "bench", "throughput", "model", *work)
    assert told.startswith("trueline: 2 requests of 8 + 4 tokens")


@pytest.mark.parametrize("name", ON_A_GPU)
def test_benchmarks_can_be_imported(name: str) -> None:
    pytest.importorskip("triton")
    importlib.import_module(f"trueline.bench.{name}")


@pytest.mark.slow
def test_benchmarks_can_be_imported_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    imports = "; ".join(f"import trueline.bench.{name}" for name in ON_A_GPU)
    run(installed, tmp_path, "-c", imports)
