"""The example of several machines: servers that Ray has placed on two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paths import ROOT
from trueline import LLM, SamplingParams

EXAMPLE = ROOT / "examples/ray_servers/ray_servers.py"
IDS = [5, 6, 7, 8, 9]


@pytest.fixture
def address() -> Iterator[str]:
    reason = "ray is not installed: pip install 'trueline[ray]'"
    cluster_utils: Any = pytest.importorskip("ray.cluster_utils", reason=reason)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


def complete(url: str) -> list[int]:
    asked = {"prompt": IDS, "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    found = httpx2.post(f"{url}/v1/completions", json=asked, timeout=30)
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow
def test_servers_on_two_nodes_of_a_ray_cluster(tiny: Callable[..., Path], address: str) -> None:
    model = tiny("deepseek_v3")
    greedy = SamplingParams(temperature=0, max_tokens=6)
    llm = LLM(model, device="cpu")
    (right,) = llm.generate([{"prompt_token_ids": IDS}], greedy, use_tqdm=False)
    command = [sys.executable, str(EXAMPLE), str(model), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_ADDRESS": address}
    ) as process:
        try:
            urls = [url_after(process, "ready") for _ in range(2)]
            assert len(set(urls)) == 2
            for url in urls:
                assert complete(url) == list(right.outputs[0].token_ids)
            one, _ = servers(os.getpid())
            os.kill(one, signal.SIGKILL)
            urls.remove(url_after(process, "lost"))
            assert complete(urls[0]) == list(right.outputs[0].token_ids)
            process.send_signal(signal.SIGINT)
            process.wait(30)
            with pytest.raises(httpx2.TransportError):
                complete(urls[0])
        finally:
            process.kill()


def url_after(process: subprocess.Popen[str], word: str) -> str:
    """In what it prints; the servers' own lines come between."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(rf"{word} (http://\S+)$", line):
            return found[1]
    raise AssertionError(f"it never said '{word}'")


def servers(pid: int) -> list[int]:
    """Of the Ray cluster that this process has started."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{child}/cmdline").read_text().startswith("ray::Server"):
            found.append(int(child))
        found += servers(int(child))
    return found
