"""What those who run the server get: the dashboard of its metrics, and the unit of systemd."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest

from paths import ROOT
from servers import Served, serving
from trueline.server.config import ServerConfig
from trueline.server.run import FLUSH_SECONDS

Tiny = Callable[..., Path]
DASHBOARD = ROOT / "examples" / "grafana" / "trueline.json"
UNIT = ROOT / "examples" / "systemd" / "trueline.service"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


def expressions() -> dict[str, list[str]]:
    """Of the dashboard's panels, by their titles."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in panels
        if panel["type"] != "row"
    }


def charted(expression: str) -> set[str]:
    return set(re.findall(r"trueline:\w+", expression))


def exported(metrics: str) -> dict[str, set[str]]:
    """Names of samples, by metric."""
    types = re.findall(r"^# TYPE (\S+) (\w+)$", metrics, re.MULTILINE)
    return {name: {name + each for each in SUFFIXES.get(kind, ("",))} for name, kind in types}


def test_the_dashboard_charts_what_is_exported_and_systemd_is_told(
    tiny: Tiny, tmp_path: Path
) -> None:
    """One server for both. It has state slots, so that their metric is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        model = tiny("bailing_moe_v2_5")
        flags = ("--max-model-len", "256", "--served-model-name", "tiny")
        with serving(model, *flags, NOTIFY_SOCKET=str(tmp_path / "notify")) as served:
            told = [systemd.recv(4096).decode()]
            while not told[-1].startswith("READY=1\n"):
                told.append(systemd.recv(4096).decode())
            assert told[-1] == f"READY=1\nSTATUS=tiny on {served.url}"
            assert len(told) > 1
            assert all(line.startswith("STATUS=loading: ") for line in told[:-1])
            # state slots are told with the first step
            assert served.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).is_success
            found = exported(served.get("/metrics").text)
            served.signal(signal.SIGTERM)
            assert systemd.recv(4096) == b"STOPPING=1"
            assert served.ended() == 0
    names = {name for asked in expressions().values() for each in asked for name in charted(each)}
    assert names <= set().union(*found.values()), "charted, and not exported"
    assert {name for name in found if not names & found[name]} == set(), "exported, and not charted"


def test_panels_can_be_looked_at() -> None:
    """Ids are different, places do not overlap, variables are defined."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables | {
        "__rate_interval",
        "__range",
    }


# -- a Prometheus that asks a server -----------------------------------------------------


@contextmanager
def prometheus(served: Served, at: Path) -> Iterator[Callable[[str], list[Any]]]:
    """A function that asks it an expression."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = served.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "trueline", "static_configs": [{"targets": [target]}]}],
    }
    (at / "prometheus.yml").write_text(json.dumps(config))  # YAML too
    command = ["prometheus", f"--config.file={at / 'prometheus.yml'}", f"--storage.tsdb.path={at}",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
    process = subprocess.Popen(command)

    def ask(expression: str) -> list[Any]:
        url = f"http://127.0.0.1:{port}/api/v1/query"
        answer = httpx2.get(url, params={"query": expression}, timeout=10)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return list(answer.json()["data"]["result"])

    try:
        _until(lambda: bool(ask('up{job="trueline"} == 1')))
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if done():
                return
        except httpx2.TransportError:
            assert time.monotonic() < end
        assert time.monotonic() < end
        time.sleep(0.2)


def use(served: Served, until: float) -> None:
    """Requests of every kind that is charted, some twice."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    chat = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    text = {"prompt": "a line that comes again and again, and is found in the prefix cache " * 2,
            "max_tokens": 20, "ignore_eos": True, "n": 2}  # fmt: skip
    while time.monotonic() < until:
        assert served.post("/v1/chat/completions", json=chat | {"max_tokens": 8}).is_success
        assert served.post("/v1/completions", json=text).is_success


@pytest.mark.slow
def test_every_query_has_an_answer(tiny: Tiny, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus: apt-get install prometheus")
    flags = ("--max-model-len", "256", "--snapshot-spacing", "16")
    with (
        serving(tiny("bailing_moe_v2_5"), *flags) as served,
        prometheus(served, tmp_path) as ask,
    ):
        _until(lambda: bool(ask("trueline:engine_up")))
        working = Thread(target=use, args=(served, time.monotonic() + 6))
        working.start()
        working.join()
        time.sleep(2.2)  # two more scrapes
        for title, asked in expressions().items():
            for expression in asked:
                for name, value in (("model", ".*"), ("instance", ".*"),
                                    ("__rate_interval", "30s"), ("__range", "1m")):  # fmt: skip
                    expression = expression.replace(f"${name}", value)
                answers = ask(expression)
                assert answers, f"{title}: {expression}: no data"
                values = [float(answer["value"][1]) for answer in answers]
                assert all(value == value for value in values), f"{title}: {expression}: {values}"


# -- systemd ------------------------------------------------------------------------------


def unit() -> dict[str, str]:
    """Its options; of those that stand several times the last."""
    lines = (line.partition("=") for line in UNIT.read_text().splitlines() if line[:1].isalpha())
    return {name: value for name, _, value in lines}


def test_the_unit_leaves_time_to_drain() -> None:
    service = unit()
    assert float(service["TimeoutStopSec"]) >= ServerConfig().shutdown_timeout + FLUSH_SECONDS + 5
    assert service["KillMode"] == "mixed", "the engine is not to be told, only the server"
    assert service["Type"] == "notify"
    assert service["TimeoutStartSec"] == "infinity", "a large model loads for long"


def test_a_wrong_option_is_not_tried_again(tmp_path: Path) -> None:
    stays_wrong = unit()["RestartPreventExitStatus"].split()
    command = [sys.executable, "-m", "trueline", "serve", str(tmp_path / "none")]
    assert str(subprocess.run(command, capture_output=True).returncode) in stays_wrong


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: apt-get install systemd")
    # it looks whether the program is there
    text = UNIT.read_text().replace("/opt/trueline/bin/trueline", "/bin/true")
    (tmp_path / "trueline.service").write_text(text)
    for verb in (["verify"], ["security", "--offline=true", "--threshold=20"]):
        command = ["systemd-analyze", "--no-pager", *verb, str(tmp_path / "trueline.service")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "trueline.service:" not in done.stderr
