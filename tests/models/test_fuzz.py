"""Mutated configs and damaged checkpoints: success or one of our errors, and no silent change."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import published
from trueline.describe import describe
from trueline.errors import CheckpointError, ConfigError, TruelineError
from trueline.models import read_model
from trueline.models.harmless import HARMLESS
from trueline.tiny.configs import FAMILIES
from trueline.weights.checkpoint import open_checkpoint
from trueline.weights.ledger import balance

CONFIGS: dict[str, dict[str, Any]] = {
    **published.ALL,
    **{f"tiny {name}": dict(config) for name, config in FAMILIES.items()},
}

Path_ = tuple[str, ...]


def paths(config: dict[str, Any], prefix: Path_ = ()) -> Iterator[Path_]:
    """Every key, also inside sections, but not inside what we never look into."""
    for key, value in config.items():
        yield (*prefix, key)
        if key in ("vision_config", "auto_map") or not isinstance(value, dict):
            continue
        yield from paths(value, (*prefix, key))


def parent(config: dict[str, Any], path: Path_) -> dict[str, Any]:
    for key in path[:-1]:
        config = config[key]
    return config


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "default", "sigmoid", "softmax", "float32", "greedy"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=4,
)


@st.composite
def mutations(draw: Callable[..., Any]) -> tuple[str, str, Path_, dict[str, Any]]:
    """(what was done, to which config, where, the mutated config)."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    config = copy.deepcopy(CONFIGS[name])
    path = draw(st.sampled_from(sorted(paths(config))))
    section, key = parent(config, path), path[-1]
    kind = draw(st.sampled_from(["drop", "rename", "set", "insert"]))
    if kind == "drop":
        del section[key]
    elif kind == "rename":
        other = draw(st.sampled_from([key + "s", key[:-1], key.upper(), "x_" + key, key + "_"]))
        section[other] = section.pop(key)
    elif kind == "set":
        section[key] = draw(json_values)
    else:
        path = (*path[:-1], "surprise")
        section["surprise"] = draw(json_values)
    return kind, name, path, config


def facts(config: dict[str, Any]) -> dict[str, tuple[Any, str, str]]:
    """Every resolved fact of a config: where it is -> (value, kind of source, source)."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(config))
        report = describe(file)
    found: dict[str, tuple[Any, str, str]] = {}

    def collect(node: Any, at: str) -> None:
        for fact in node.get("facts", ()):
            found[f"{at}{fact['name']}"] = (fact["value"], fact["from"], fact["source"])
        for name, inner in node.items():
            if isinstance(inner, dict) and "facts" in inner:
                collect(inner, f"{at}{name}.")

    collect(report, "")
    for kind in report["layer_kinds"]:
        for layer in kind["layers"]:
            collect(kind, f"layer {layer} ")
    return found


@cache
def original(name: str) -> dict[str, tuple[Any, str, str]]:
    return facts(CONFIGS[name])


@given(mutations())
def test_no_mutated_config_changes_a_fact_silently(
    mutation: tuple[str, str, Path_, dict[str, Any]],
) -> None:
    kind, name, path, config = mutation
    try:
        got = facts(config)
    except ConfigError as error:
        assert "config.json" in str(error)
        return
    before = original(name)
    changed = {key for key in got.keys() | before.keys() if got.get(key) != before.get(key)}
    values = {key for key in changed if got.get(key, (0,))[0] != before.get(key, (0,))[0]}
    if kind in ("rename", "insert"):
        # a name that we do not know never gets through, unless it is one we never look at
        assert not values, f"{path} changed {values}"
        assert path[-1] in HARMLESS or len(path) > 1 or not changed
        return
    key = ".".join(path)
    # a key that makes a layer another kind brings that kind's facts with it
    for fact in values & got.keys() & before.keys():
        _, origin, source = got[fact]
        explained = origin in ("default", "formula") or source == key or source.startswith(key)
        assert explained, f"{kind} {key} changed {fact}, which says it comes from {origin} {source}"


DTYPES = st.sampled_from(["F32", "F16", "F8_E4M3", "I32", "F3", "", None, 7])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trueline.tiny.configs import family_config
    from trueline.tiny.make import TinyOptions, make_checkpoint

    directory = tmp_path_factory.mktemp("fuzz") / "model"
    config = family_config("deepseek_v3") | {"num_hidden_layers": 2}
    make_checkpoint(directory, config, TinyOptions(max_shard_bytes=400_000))
    return directory


def try_to_open(directory: Path) -> bool:
    """Whether the checkpoint is found in order; any error must be one of ours."""
    try:
        checkpoint = open_checkpoint(directory)
        if checkpoint is None:
            return False
        balance(checkpoint, read_model(directory)).require_balanced(checkpoint)
    except TruelineError as error:
        assert isinstance(error, CheckpointError)
        return False
    return True


def copy_of(model: Path, scratch: str) -> Path:
    copy = Path(scratch) / "model"
    shutil.copytree(model, copy)
    return copy


@given(data=st.data())
def test_truncated_files(model: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_of(model, scratch)
        file = data.draw(st.sampled_from(sorted(copy.glob("*.safetensors"))))
        size = file.stat().st_size
        at = data.draw(st.integers(0, 2000) | st.integers(0, size - 1))
        with file.open("rb+") as stream:
            stream.truncate(min(at, size - 1))
        assert not try_to_open(copy)


@given(data=st.data())
def test_damaged_headers(model: Path, data: st.DataObject) -> None:
    """Bytes of a header overwritten: either nothing that matters changed, or it is noticed."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_of(model, scratch)
        file = data.draw(st.sampled_from(sorted(copy.glob("*.safetensors"))))
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        at = data.draw(st.integers(0, 7 + length))
        raw[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != raw[at]))
        file.write_bytes(raw)
        if try_to_open(copy):  # only white space or metadata can be touched unnoticed
            assert chr(raw[at]).isspace() or b"__metadata__" in raw[8 : 8 + length]


@given(data=st.data())
def test_edited_headers(model: Path, data: st.DataObject) -> None:
    """One entry of a header changed by hand, the bytes left as they are."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_of(model, scratch)
        file = data.draw(st.sampled_from(sorted(copy.glob("*.safetensors"))))
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        names = sorted(header.keys() - {"__metadata__"})
        name = data.draw(st.sampled_from(names))
        entry = header[name]
        before = json.dumps(header)
        kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "rename", "drop"]))
        if kind == "dtype":
            entry["dtype"] = data.draw(DTYPES)
        elif kind == "rename":
            header[data.draw(st.sampled_from([name + "x", name[:-1], "x." + name]))] = header.pop(
                name
            )
        elif kind == "drop":
            del header[name]
        else:
            entry[kind] = data.draw(st.lists(st.integers(-2, 90) | st.text(max_size=2), max_size=3))
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        assert try_to_open(copy) == (json.dumps(header) == before)


@given(data=st.data())
def test_damaged_index(model: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        copy = copy_of(model, scratch)
        index = copy / "model.safetensors.index.json"
        document = json.loads(index.read_text())
        weights = document["weight_map"]
        name = data.draw(st.sampled_from(sorted(weights)))
        kind = data.draw(st.sampled_from(["drop", "extra", "elsewhere", "gone", "odd", "outside"]))
        if kind == "drop":
            del weights[name]
        elif kind == "extra":
            weights[name + ".more"] = weights[name]
        elif kind == "elsewhere":
            weights[name] = next(f for f in set(weights.values()) if f != weights[name])
        elif kind == "gone":
            weights[name] = "model-00009-of-00009.safetensors"
        elif kind == "odd":
            document["weight_map"] = data.draw(json_values.filter(lambda v: v != {}))
        else:
            weights[name] = "../model.safetensors"
        index.write_text(json.dumps(document))
        assert not try_to_open(copy)
