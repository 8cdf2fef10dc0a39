"""Replacements from outside: how they are found, chosen, named, refused; that they compute the same
numbers, and that conformance sees it when they do not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples import call, install
from trueline import LLM, SamplingParams, plugins
from trueline.config import EngineConfig
from trueline.engine.loading import load_engine
from trueline.errors import ConfigError, PluginError, UsageError
from trueline.models import read_model
from trueline.plan.plan import Plan
from trueline.verify.engine import BAND, Ask, run, same
from trueline.verify.schedules import prompt
from trueline.weights.formats.block_fp8 import BlockFp8

Tiny = Callable[..., Path]
Package = Callable[..., None]
LING = "bailing_moe_v2_5"
PYTEST = ("pytest", "-p", "trueline.verify.plugin", "-p", "no:cacheprovider")
BASE = EngineConfig(max_model_len=200, num_gpu_blocks_override=60, max_num_seqs=4)
ASKS = [Ask(prompt(70), 4), Ask(prompt(1), 6, arrives=1)]
# Our own kernel under another name.
LIGHTNING = (
    "api_version = 5\n"
    "from trueline.ops.lightning.cpu import decode, prefill, prepare, prepare_prefill\n"
    "from trueline.ops.capabilities import Capabilities\n"
    "capabilities = Capabilities(devices=('cpu',), batch_invariant=True)\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """package(name, source, group={key: target}) as if installed; its module is the name."""
    made: list[str] = []

    def make(name: str, source: str = "", version: str = "1.0", **groups: dict[str, str]) -> None:
        root = tmp_path / name
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (root / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[trueline.{group}]", *(f"{k} = {v}" for k, v in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(root)
        plugins.installed.cache_clear()
        made.append(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)
    plugins.installed.cache_clear()


def plan(model: Path, **changes: Any) -> Plan:
    return load_engine(model, replace(BASE, **changes)).plan


def line(plan: Plan, start: str) -> str:
    return next(line for line in plan.lines() if line.startswith(start))


# -- the worked example ------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("linear_attention", tmp_path_factory.mktemp("site"))


def test_the_example_replaces_a_kernel_and_a_layer(installed_example: Path, tiny: Tiny) -> None:
    done = call(
        installed_example, "trueline", "generate", str(tiny(LING)), "--prompt", "true to the",
        "--max-tokens", "12", "--temperature", "0", "--ignore-eos", "--logprobs", "1", "--json",
        "--op", "lightning=example", "--layer", "lightning=counting",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    origin = "(asked for; from trueline-example 0.1.0)"
    assert f"lightning    example {origin}\n" in done.stderr
    assert f"layer        lightning: counting {origin}\n" in done.stderr
    theirs = json.loads(done.stdout)["outputs"][0]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    ours = LLM(tiny(LING)).generate("true to the", params, use_tqdm=False)[0].outputs[0]
    assert theirs["token_ids"] == ours.token_ids
    assert theirs["cumulative_logprob"] == pytest.approx(ours.cumulative_logprob, abs=12 * BAND)


@pytest.mark.slow
def test_the_example_conforms(installed_example: Path) -> None:
    replaced = ("--op", "lightning=example", "--layer", "lightning=counting")
    done = call(installed_example, *PYTEST, *replaced)
    assert done.returncode == 0, done.stdout
    assert "35 passed, 7 skipped" in done.stdout


def test_the_layer_counts(
    installed_example: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class is what runs, and no other layer is replaced."""
    monkeypatch.syspath_prepend(installed_example)
    plugins.installed.cache_clear()
    done = run(tiny(LING), ASKS, BASE, layers={"lightning": "counting"})
    layers = [layer.mixer for layer in done.core.executor.runner.decoder.layers]
    counts = [layer.tokens for layer in layers if type(layer).__name__ == "CountingLightning"]
    # a request's last token is sampled and not computed
    assert counts == [70 + 3 + 1 + 5] * len(counts)
    assert 0 < len(counts) < len(layers)
    same("counted", done, run(tiny(LING), ASKS, BASE), bitwise=True)
    plugins.installed.cache_clear()


def test_a_wrong_replacement_does_not_conform(
    installed_example: Path, tiny: Tiny, tmp_path: Path
) -> None:
    """The off-by-one that the example's README speaks of."""
    shutil.copytree(installed_example, tmp_path, dirs_exist_ok=True)
    module = tmp_path / "trueline_example.py"
    right = module.read_text()
    wrong = right.replace("decay(slopes, at + 1)", "decay(slopes, at)")
    assert wrong != right
    module.write_text(wrong)
    some = ("-k", "cuts or slots or oracle or split or mixed or width")
    model = ("--model", str(tiny(LING)), "--replay-dir", "replays")
    done = call(tmp_path, *PYTEST, "-q", "-rs", "--op", "lightning=example", *model, *some)
    assert done.returncode == 1
    for name in ("any cuts", "slots", "engine oracle on ling", "split = whole on ling"):
        assert f"[op lightning=example: {name}]" in done.stdout
    assert "CheckFailed: op = reference: lightning, tail 0, by decode: a row" in done.stdout
    assert "CheckFailed: oracle: request 0: position" in done.stdout
    # and on a model: what is wrong is named, and what could not be forced is not passed
    assert "linear attention is off by " in done.stdout
    assert "; right with lightning=reference" in done.stdout
    replayed = "replay it with: trueline replay replays/modes-mixed-step.replay.safetensors"
    assert replayed in done.stdout
    assert (tmp_path / "replays" / "modes-mixed-step.replay.safetensors").is_file()
    assert "3 skipped" in done.stdout
    assert "the model cannot be divided so" in done.stdout


def test_conformance_says_what_it_needs(tmp_path: Path) -> None:
    done = call(tmp_path, *PYTEST, "--op", "lightning=exampel")
    assert done.returncode != 0
    assert "has no implementation 'exampel'; accepted: cpu, reference" in done.stdout


# -- which one runs ----------------------------------------------------------------------


def test_installed_is_not_chosen(package: Package, tiny: Tiny) -> None:
    package("plain", LIGHTNING, ops={"lightning.mine": "plain"})
    assert line(plan(tiny(LING)), "lightning") == "lightning    cpu (preferred, and runs here)"
    asked = plan(tiny(LING), ops={"lightning": "mine"})
    assert line(asked, "lightning") == "lightning    mine (asked for; from plain 1.0)"


def test_preferred_is_chosen_unless_it_refuses(package: Package, tiny: Tiny) -> None:
    refusing = (
        "def refuses(context):\n"
        "    return ['only on Tuesdays'] if context.batch_invariant else []\n"
        "capabilities = Capabilities(\n"
        "    devices=('cpu',), batch_invariant=True, preferred=True, refuses=refuses)\n"
    )
    package("eager", LIGHTNING + refusing, ops={"lightning.mine": "eager"})
    chosen = line(plan(tiny(LING)), "lightning")
    assert chosen == "lightning    mine (preferred, and runs here; from eager 1.0)"
    ours = run(tiny(LING), ASKS, BASE, ops={"lightning": "cpu"})
    same("preferred", run(tiny(LING), ASKS, BASE), ours, bitwise=True)
    other = line(plan(tiny(LING), batch_invariant=True), "lightning")
    assert other == "lightning    cpu (not mine: only on Tuesdays)"
    with pytest.raises(UsageError, match="op lightning=mine was asked for and refuses: only on Tu"):
        plan(tiny(LING), ops={"lightning": "mine"}, batch_invariant=True)


# Our own GEMM, for weights that are stored in one format.
LINEAR = """
api_version = 5
from trueline.ops.capabilities import Capabilities
from trueline.ops.linear import torch_mm
capabilities = Capabilities(devices=("cpu",), formats=("block fp8",))
packed = []
run, run_wide = torch_mm.run, torch_mm.run_wide
def pack(weight):
    packed.append(weight.format)
    return torch_mm.pack(weight)
"""


def test_an_op_for_one_stored_format(package: Package, tiny: Tiny) -> None:
    """It gets the weights of its format, and others get the rest: exempt ones, router and head."""
    exempt = ("model.layers.1.self_attn.o_proj", "model.layers.2.self_attn.kv_a_proj_with_mqa")
    storage = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=exempt)
    model = tiny("deepseek_v3", storage=storage)
    package("fast", LINEAR, ops={"linear.mine": "fast"})
    ops = {"mlp": "cpu", "experts": "cpu"}
    mine = load_engine(model, replace(BASE, ops=ops | {"linear": "mine"}))
    assert " mine (" not in line(mine.plan, "linear")
    told = "linear       block fp8: mine (asked for; from fast 1.0; weights stay as stored)"
    assert told in mine.plan.lines()
    # Fused inputs, q_b and o of four layers, without two that are exempt or have a part that is;
    # gate_up and down of a dense MLP, of three shared experts and of three times twelve routed.
    assert sys.modules["fast"].packed == ["block fp8"] * (3 * 4 - 2 + 2 + 3 * 2 + 3 * 12 * 2)
    done = run(model, ASKS, BASE, ops=ops | {"linear": "mine"})
    same("by format", done, run(model, ASKS, BASE, ops=ops | {"linear": "torch_mm"}))
    with pytest.raises(UsageError, match="linear=mine was asked for and packs block fp8 weights, "):
        plan(tiny("deepseek_v3"), ops={"linear": "mine"})


def test_a_preferred_op_for_one_stored_format(package: Package, tiny: Tiny) -> None:
    package(
        "fast", LINEAR.replace("formats=", "preferred=True, formats="), ops={"linear.mine": "fast"}
    )
    storage = BlockFp8(block=(32, 32), power_of_two_scales=False, ignored_modules=())
    lines = list(plan(tiny("deepseek_v3", storage=storage)).lines())
    assert any(text.startswith("linear       block fp8: mine (preferred") for text in lines)
    why = "not mine: packs block fp8 weights, not dense ones"
    assert any(text.startswith("linear  ") and why in text for text in lines)
    assert not any("mine (" in text for text in plan(tiny("deepseek_v3")).lines())


def test_a_layer_may_refuse(package: Package, tiny: Tiny) -> None:
    source = (
        "from trueline.layers.mla import MLA\n"
        "from trueline.ops.capabilities import Capabilities\n"
        "class Mine(MLA):\n    api_version = 5\n"
        "    capabilities = Capabilities(devices=('cpu',))\n"
    )
    package("picky", source, layers={"mla.mine": "picky:Mine"})
    chosen = plan(tiny("deepseek_v3"), layers={"mla": "mine"})
    assert line(chosen, "layer") == "layer        mla: mine (asked for; from picky 1.0)"
    assert [choice.name for choice in chosen.layers.values()] == ["mine", "trueline", "trueline"]
    with pytest.raises(
        UsageError, match="layer mla=mine was asked for and refuses: not batch-invariant"
    ):
        plan(tiny("deepseek_v3"), layers={"mla": "mine"}, batch_invariant=True)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_feed_forward_layers_can_be_replaced(kind: str, package: Package, tiny: Tiny) -> None:
    name = {"dense": "Dense", "moe": "MoE"}[kind]
    source = (
        f"from trueline.layers.feedforward import {name}\nclass Mine({name}):\n"
        "    api_version = 5\n    def forward(self, x, forced):\n"
        "        y, ids = super().forward(x, forced)\n        return 2 * y, ids\n"
    )
    package("doubling", source, layers={f"{kind}.mine": "doubling:Mine"})
    done = run(tiny("deepseek_v3"), ASKS, BASE, layers={kind: "mine"})
    classes = [
        type(layer.feed_forward).__name__ for layer in done.core.executor.runner.decoder.layers
    ]
    assert set(classes) == {"Mine", "MoE" if kind == "dense" else "Dense"}
    own = run(tiny("deepseek_v3"), ASKS, BASE)
    assert not any(
        bool((done.logits[0][p] == row).all()) for p, row in own.logits[0].items() if p < 70
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"layers": {"mlla": "x"}},
            "layer 'mlla': accepted: mla, compressed, lightning, dense, moe, mixer; the near",
        ),
        ({"layers": {"mla": "x"}}, "layer 'mla' has no implementation 'x'; accepted: trueline"),
        ({"layers": {"lightning": "trueline"}}, "deepseek_v3 has none; accepted here: mla, dense"),
        ({"ops": {"lightnin": "cpu"}}, "op 'lightnin': accepted: linear,"),
        ({"ops": {"mlp": "gpu"}}, "op 'mlp' has no implementation 'gpu'; accepted: native, cpu"),
    ],
)
def test_names_that_are_not_there(changes: dict[str, Any], part: str, tiny: Tiny) -> None:
    with pytest.raises(UsageError) as caught:
        plan(tiny("deepseek_v3"), **changes)
    assert part in str(caught.value)


# -- packages that do not fit ------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (LIGHTNING.replace("= 5", "= 4"), "states api_version 4, this Trueline has 5"),
        (LIGHTNING.replace("api_version = 5", ""), "states api_version None, this Trueline has 5"),
        (
            LIGHTNING.replace("decode, prefill, ", "decode, "),
            "lacks prefill; needed: prepare, decode, prepare_prefill, prefill",
        ),
        (
            LIGHTNING.replace("capabilities = ", "abilities = "),
            "declares no capabilities: set `capabilities = Capabilities(devices=…)`",
        ),
        (
            LIGHTNING.replace("batch_invariant", "optional=('run_wide',), batch_invariant"),
            "declares optional run_wide; accepted: none",
        ),
        ("1 / 0", "cannot be imported (odd): ZeroDivisionError('division by zero')"),
        ("import nowhere", "cannot be imported (odd): ModuleNotFoundError(\"No module named 'no"),
    ],
)
def test_what_does_not_fit_is_named(source: str, part: str, package: Package, tiny: Tiny) -> None:
    package("odd", source, "2.5", ops={"lightning.mine": "odd"})
    told = f"odd 2.5: trueline.ops 'lightning.mine' {part}"
    with pytest.raises(PluginError) as caught:
        plan(tiny(LING), ops={"lightning": "mine"})
    assert told in str(caught.value)
    # nobody asked for it: ours runs, and the plan tells why not theirs
    assert line(plan(tiny(LING)), "lightning").startswith(f"lightning    cpu (not mine: {told}")


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        (
            {"ops": {"lightening.mine": "odd"}},
            "odd 1.0: entry point 'lightening.mine' of trueline.ops: accepted: KIND.NAME with a "
            "kind of linear, batched_gemm,",
        ),
        ({"ops": {"mine": "odd"}}, "entry point 'mine' of trueline.ops: accepted: KIND.NAME"),
        ({"ops": {"linear": "odd"}}, "entry point 'linear' of trueline.ops: accepted: KIND.NAME"),
        ({"layers": {"norm.mine": "odd"}}, "a kind of mla, compressed, lightning, dense, moe"),
        ({"models": {"deepseek_v9": "odd"}}, "a kind of model_type, architecture"),
        ({"ops": {"linear.native": "odd"}}, "is claimed by trueline itself and by odd 1.0"),
        ({"layers": {"mla.trueline": "odd"}}, "is claimed by trueline itself and by odd 1.0"),
        ({"models": {"model_type.kimi_k2": "odd"}}, "is claimed by trueline itself and by odd"),
        ({"models": {"architecture.DeepseekV3ForCausalLM": "odd"}}, "trueline itself and by odd"),
    ],
)
def test_declarations_without_a_place(
    groups: dict[str, dict[str, str]], part: str, package: Package, tiny: Tiny
) -> None:
    package("odd", **groups)
    with pytest.raises(PluginError) as caught:
        plan(tiny("deepseek_v3"), layers={"mla": "trueline"})
    assert part in str(caught.value)


def test_two_packages_with_one_name(package: Package, tiny: Tiny) -> None:
    for name in ("one", "two"):
        package(name, LIGHTNING, ops={"lightning.mine": name})
    with pytest.raises(PluginError, match=r"'lightning\.mine' is claimed by one 1\.0 and by two 1"):
        plan(tiny(LING))


def test_nothing_is_imported_that_nobody_needs(package: Package, tiny: Tiny) -> None:
    bomb = "raise SystemExit('imported')"
    package("bomb", bomb, ops={"lightning.mine": "bomb"}, layers={"mla.mine": "bomb:X"},
            models={"model_type.bomb": "bomb", "architecture.Bomb": "bomb"})  # fmt: skip
    plan(tiny("deepseek_v3"))
    assert "bomb" not in sys.modules


# -- families ----------------------------------------------------------------------------

FAMILY = """
from dataclasses import replace
from trueline.models.deepseek import DEEPSEEK_V3

api_version = 5

def read(fields, overrides):
    line = replace(DEEPSEEK_V3, model_type="example_v3", architectures=("ExampleForCausalLM",))
    spec = line.read(fields, overrides)
    return replace(spec, renamed=(("model.embed_tokens.", "model.wte."),))
"""


@pytest.fixture
def foreign(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A DeepSeek-V3 of another name, whose files call the embedding something else."""

    def make(**keys: Any) -> Path:
        directory = tmp_path / "foreign"
        shutil.copytree(tiny("deepseek_v3"), directory)
        config = json.loads((directory / "config.json").read_text()) | keys
        (directory / "config.json").write_text(json.dumps(config))
        for file in directory.glob("*.safetensors"):
            tensors = load_file(file)
            renamed = {k.replace("embed_tokens", "wte"): v for k, v in tensors.items()}
            save_file(renamed, file)
        return directory

    return make


@pytest.mark.parametrize(
    ("key", "model_type"),
    [("model_type.example_v3", "example_v3"), ("architecture.ExampleForCausalLM", "deepseek_v3")],
)
def test_a_family_from_outside(
    key: str, model_type: str, package: Package, foreign: Callable[..., Path], tiny: Tiny
) -> None:
    """Also one that shares its model_type with ours, and differs in its architecture."""
    model = foreign(model_type=model_type, architectures=["ExampleForCausalLM"])
    with pytest.raises(ConfigError, match="accepted"):
        read_model(model)
    package("family", FAMILY, models={key: "family"})
    assert read_model(model).family == "example_v3"
    same("family", run(model, ASKS, BASE), run(tiny("deepseek_v3"), ASKS, BASE), bitwise=True)


def test_a_family_of_another_version_is_refused(
    package: Package, foreign: Callable[..., Path]
) -> None:
    model = foreign(model_type="example_v3", architectures=["ExampleForCausalLM"])
    package("family", FAMILY.replace("= 5\n", "= 1\n"), models={"model_type.example_v3": "family"})
    with pytest.raises(PluginError, match="states api_version 1, this Trueline has 5"):
        read_model(model)
