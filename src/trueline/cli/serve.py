"""`trueline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, Token

from trueline.cli.arguments import model_or_default
from trueline.cli.completion import MODEL
from trueline.cli.counts import expand_counts
from trueline.cli.engine_flags import EngineFlags
from trueline.config import EngineConfig
from trueline.errors import UsageError, did_you_mean, nearest
from trueline.server.config import ServerConfig
from trueline.utils.environment import environment_names, environment_setting
from trueline.utils.json_types import JSON

if TYPE_CHECKING:
    from cyclopts import ArgumentCollection


def serve(
    model: Annotated[str | None, MODEL] = None,
    /,
    *,
    config: Path | None = None,
    print_config: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    op: tuple[str, ...] = (),
    layer: tuple[str, ...] = (),
    fact: tuple[str, ...] = (),
    server: Annotated[ServerConfig, Parameter(name="*", group="Server")] = ServerConfig(),  # noqa: B008
    engine: Annotated[EngineFlags, Parameter(name="*", group="Engine")] = EngineFlags(),  # noqa: B008
) -> int:
    """Serve a model behind OpenAI's HTTP interface, until SIGTERM or Ctrl-C.

    Every option can also be given in the environment (--max-num-seqs as TRUELINE_MAX_NUM_SEQS) and
    in a file (max_num_seqs). A flag wins over the environment, the environment over the file.

    Parameters
    ----------
    model
        A model directory, a built-in model, or a hub id (owner/name). Default: the
        built-in witness-v3.
    config
        A TOML or JSON file with options.
    print_config
        Print what is set, as such a file, and end.
    dry_run
        Print the plan (memory, implementations and why), load nothing, and end.
    op
        Choose an implementation of an op, as linear=torch_mm. May be given several times.
    layer
        Replace a kind of layer by an installed package's, as lightning=NAME. May be given
        several times.
    fact
        Override a fact that published sources contradict each other on, as NAME=VALUE. May be
        given several times.
    """
    options = engine.config(op, layer, fact)
    if print_config:
        values = {item.name: getattr(options, item.name) for item in fields(EngineConfig)}
        given = {"op": list(op), "layer": list(layer), "fact": list(fact)}
        shown = asdict(server) | values | given
        shown["api_key"] = None  # never printed
        print(_as_toml(shown), end="")
        return 0
    name = model_or_default(model)
    if dry_run:
        return _dry_run(name, options)
    if options.node_rank:
        return _serve_node(name, options)
    try:
        from trueline.server.run import run
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("trueline"):
            raise
        raise UsageError(
            f"serve needs {error.name}, which is not installed: pip install 'trueline[server]'"
        ) from None
    return run(name, options, server)


def _serve_node(model: str, options: EngineConfig) -> int:
    """The ranks of a machine other than the first, until that one ends."""
    from trueline.engine.ranks.join import run_node
    from trueline.utils.hub import find_model

    return run_node(find_model(model), options)


def _dry_run(model: str, options: EngineConfig) -> int:
    from trueline.device import find_device
    from trueline.models import read_model
    from trueline.plan.plan import make_plan
    from trueline.utils.hub import find_model

    spec = read_model(find_model(model, weights=False), options.facts)
    print(f"model        {spec.family}, {spec.num_layers} layers")
    print("\n".join(make_plan(spec, options, find_device(options.device)).lines()))
    return 0


def _as_toml(values: Mapping[str, object]) -> str:
    """What has no value has no line."""
    plain = {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }
    return "".join(
        f"{name} = {json.dumps(value)}\n"
        for name, value in plain.items()
        if value is not None and not isinstance(value, dict)
    )


# -- where options come from -------------------------------------------------------------


def fill_in(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Options that no flag has given, from the environment or the file."""
    options = {a.names[0].removeprefix("--").replace("-", "_"): a for a in arguments if a.parse}
    options = {name: a for name, a in options.items() if a.names[0].startswith("--")}
    chosen = options.pop("config").tokens
    named = chosen[0].value if chosen else environment_setting("config")
    stored = _read(Path(named)) if named else {}
    for name in stored:
        if name not in options:
            raise UsageError(
                f"{named}: '{name}' is no option of serve{did_you_mean(name, options)}"
            )
    for name in set(environment_names()) - {*options, "config", "native_target"}:
        if close := nearest(name, options):  # others name things for a service called trueline
            raise UsageError(f"TRUELINE_{name.upper()} is no option of serve; TRUELINE_"
                             f"{close.upper()} is")  # fmt: skip
    for name, argument in options.items():
        if argument.tokens:
            continue
        value = environment_setting(name)
        source = f"TRUELINE_{name.upper()}"
        found = [value] if value is not None else _texts(stored.get(name))
        for index, text in enumerate(found):
            keyword = source if value is not None else f"{named}: {name}"
            argument.append(Token(keyword=keyword, value=text, source="config", index=index))


def _texts(value: object) -> list[str]:
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return [str(each).lower() if isinstance(each, bool) else str(each) for each in values]


def _read(file: Path) -> JSON:
    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"--config {file}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--config {file}: {error}; accepted: TOML, or JSON in a .json") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {file}: accepted: an object with options")
    return found


command = App(name="serve", config=(fill_in, expand_counts))
command.default(serve)
