"""The house rules, read off the source: one owner per fact, dependencies downwards only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import budget
import trueline
from paths import CONFIGS, TESTS
from trueline.verify.cases import FP4, FP8_32, INT4
from trueline.weights.formats import Storage

ROOT = Path(trueline.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Kernels timed at published shapes, other engines beside ours: they are no part of an engine.
SCRIPTS = (ROOT / "bench" / "gpu", ROOT / "bench" / "peers")
ENGINE_FILES = [file for file in FILES if not any(file.is_relative_to(at) for at in SCRIPTS)]

# A room may import those before it. `reference` stands aside: see below.
ROOMS = (
    *("errors", "utils", "tasks", "plugins", "device", "config", "outputs", "spec", "models"),
    *("weights", "cache", "native", "ops", "kinds", "tiny", "parallel", "plan", "layers", "text"),
    *("grammar", "engine", "output_processor", "llm", "verify", "describe", "server", "client"),
    *("evaluate", "witness", "bench", "cli"),
)
NO_TORCH = (
    "errors",
    *("utils", "tasks", "plugins", "config", "spec", "models", "describe", "outputs", "grammar"),
)
# The scheduler, the pools and the prefix cache are pure bookkeeping.
NO_TORCH_FILES = (
    *("scheduler.py", "request.py", "step.py", "states.py", "params.py", "batch.py", "messages.py"),
    *("scheduler_config.py", "drafts.py", "live_request.py"),
    *("pool.py", "blocks.py", "slots.py", "prefix.py", "layout.py", "groups.py", "rows.py"),
)


def room(file: Path) -> str:
    return _room(file.relative_to(ROOT).with_suffix("").parts)


def _room(parts: tuple[str, ...]) -> str:
    """State kinds stand above the ops whose inputs they build; the stores below them."""
    return "kinds" if parts[:2] == ("cache", "kinds") else parts[0]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path, *, everywhere: bool = True) -> Iterator[str]:
    """Absolute names of what a file imports; without `everywhere`, only when it is imported."""
    tree = parsed(file)
    for node in ast.walk(tree) if everywhere else _outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not typing_only:
            yield node
            yield from _outside_functions(node)


def for_each(files: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test for all of them: to begin a test takes longer than to read a file."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            for file in files:
                try:
                    rule(file)
                except AssertionError as error:
                    raise AssertionError(f"{file.relative_to(ROOT)}: {error}") from None

        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate


@for_each(FILES)
def test_imports_point_downwards(file: Path) -> None:
    here = room(file)
    for name in imports(file):
        first, _, rest = name.partition(".")
        target = _room(tuple(rest.split(".")))
        if first != "trueline" or not target or target == "__version__":
            continue
        if here == "reference":  # the second opinion shares nothing with the first
            assert target in ("errors", "reference"), f"{file} imports {name}"
        elif target == "reference":
            assert here in ("verify", "cli", "reference"), f"{file} imports {name}"
        elif here not in ("__init__", "__main__"):
            assert ROOMS.index(target) <= ROOMS.index(here), f"{file} imports {name}"


@for_each(ENGINE_FILES)
def test_transformers_is_only_an_oracle(file: Path) -> None:
    assert not any(name.split(".")[0] == "transformers" for name in imports(file))


DISTRIBUTIONS = {"zmq": "pyzmq", "prometheus_client": "prometheus-client"}
# What others bring: a CUDA build of torch, jinja2; who uses the plug-in; a peer to measure beside.
BROUGHT = {"triton", "markupsafe", "pytest", "transformers"}


def test_what_is_imported_is_a_dependency() -> None:
    """numpy comes with most environments, and not with ours."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for e in extras if e != "dev" for each in extras[e])]
    declared = {re.split(r"[^\w-]", each)[0] for each in wanted} - {"httptools"}  # for uvicorn
    own = {*sys.stdlib_module_names, trueline.__name__, *BROUGHT}
    used = {name.partition(".")[0] for file in FILES for name in imports(file)} - own
    assert {DISTRIBUTIONS.get(name, name) for name in used} == declared


def bookkeeping(file: Path) -> bool:
    return room(file) in ("engine", "cache") and file.name in NO_TORCH_FILES


@for_each([f for f in FILES if room(f) in NO_TORCH or bookkeeping(f)])
def test_no_torch_where_facts_live(file: Path) -> None:
    assert not any(name.split(".")[0] == "torch" for name in imports(file))


@for_each([f for f in FILES if room(f) == "cli"])
def test_commands_import_torch_late(file: Path) -> None:
    slow = {"torch", "tokenizers", "safetensors"}
    assert not any(name.split(".")[0] in slow for name in imports(file, everywhere=False))


@for_each(FILES)
def test_scales_are_computed_in_spec_only(file: Path) -> None:
    """No `x ** -0.5` of a dimension outside spec/, the reference, and the faults that break it."""
    if room(file) in ("spec", "reference") or "faults" in file.parts:
        return
    for node in ast.walk(parsed(file)):
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        assert not (power and ast.unparse(node.right) in ("-0.5", "-1 / 2")), f"{file}: a scale"


CONFIG_KEYS = re.compile(
    r"""["'](qk_nope_head_dim|kv_lora_rank|num_attention_heads|rope_theta|rope_scaling|"""
    r"""mscale_all_dim|n_routed_experts|topk_group|routed_scaling_factor)["']"""
)


@for_each(FILES)
def test_config_keys_are_read_by_family_readers_only(file: Path) -> None:
    """models/ reads them, reference/ reads them again; tiny/ and the verb above it write them."""
    writers = ("tiny", "verify", "make_tiny.py")
    if room(file) in ("models", "reference", *writers) or file.name in writers:
        return
    text = re.sub(r'""".*?"""', "", file.read_text(), flags=re.DOTALL)
    assert not CONFIG_KEYS.search(text), f"{file} knows a config key"


@for_each([f for f in ENGINE_FILES if room(f) != "device" and f.name != "environment.py"])
def test_only_device_asks_what_machine_this_is(file: Path) -> None:
    text = file.read_text()
    for question in ("os.environ", "is_cuda", "cuda.is_available", "cpu_count", "/proc/"):
        assert question not in text, f"{file} asks {question}"


OP_FILES = [f for f in FILES if room(f) == "ops"]


@for_each(OP_FILES)
def test_no_op_has_a_default_scale(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef):
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            positional = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            assert not any(a.arg == "softmax_scale" and d is not None for a, d in named)
            assert not any(a.arg == "softmax_scale" for a in positional)


@for_each([f for f in FILES if room(f) in ("layers", "engine")])
def test_layers_never_see_the_world_size(file: Path) -> None:
    assert "world_size" not in file.read_text()


@for_each(ENGINE_FILES)
def test_no_model_dimension_is_written_down(file: Path) -> None:
    numbers = (
        node.value
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Constant) and type(node.value) is int
    )
    assert not {576, 656, 192, 7168}.intersection(numbers)


@for_each(FILES)
def test_files_stay_readable(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 400
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef):
            code = node.body[1:] if ast.get_docstring(node) else node.body
            length = len(ast.unparse(code).splitlines()) if code else 0
            assert length <= 60, f"{file}: {node.name} has {length} lines"


def test_rules_can_fail(tmp_path: Path) -> None:
    """The readers above see what they are meant to see."""
    file = tmp_path / "bad.py"
    file.write_text("import torch\ndef f():\n    from transformers import x\nscale = d ** -0.5\n")
    assert list(imports(file)) == ["torch", "transformers.x"]
    assert list(imports(file, everywhere=False)) == ["torch"]
    assert CONFIG_KEYS.search('config["kv_lora_rank"]')


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom trueline.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_front_end_of_the_engine_process_needs_no_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None  # importing it now raises\n"
        "import trueline.server.process.client\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("storage", [None, FP8_32, INT4, FP4], ids=lambda each: type(each).__name__)
def test_inspect_needs_no_torch(storage: Storage | None, tiny: Callable[..., Path]) -> None:
    keys = {"hidden_size": 96, "moe_intermediate_size": 64}
    config = CONFIGS / "v2lite"
    if storage is not None:
        config = tiny("deepseek_v3", keys=keys, storage=storage)
    code = (
        "import sys\nsys.modules['torch'] = None  # importing it now raises\n"
        "from trueline.cli import main\n"
        f"main(['inspect', {str(config)!r}, '--json'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_test_has_a_budget() -> None:
    assert {str(file.parent.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")} == set(
        budget.BUDGETS
    )
    # six minutes of two cores, ten of slower ones
    assert sum(budget.BUDGETS.values()) <= 720
