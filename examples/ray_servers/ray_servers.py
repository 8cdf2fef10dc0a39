"""Servers on the nodes of a Ray cluster, for a load balancer: Ray places them, and each is what
`trueline serve` is, with its own address and health.

    python ray_servers.py MODEL --servers 2 --gpus 8 --tensor-parallel-size 8
"""

from __future__ import annotations

import argparse
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SECONDS_BETWEEN_LOOKS = 0.2


@ray.remote(max_restarts=0)
class Server:
    """The server is this process, so it ends with the actor; its engine ends with it."""

    def address(self, port: int) -> tuple[str, int]:
        """Where it will listen. Port 0: one that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, port))
            return host, probe.getsockname()[1]

    def serve(self, model: str, host: str, port: int, options: list[str]) -> None:
        from trueline.cli import main

        main(["serve", model, "--host", host, "--port", str(port), *options])


def place(count: int, gpus: int) -> list[Any]:
    """Actors, each on a node of its own while there are enough."""
    each = {"GPU": gpus} if gpus else {"CPU": 1}
    group = placement_group([each] * count, strategy="SPREAD")
    ray.get(group.ready())
    return [
        Server.options(
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(count)
    ]


def wait_until_ready(url: str, serving: Any) -> None:
    while not ray.wait([serving], timeout=SECONDS_BETWEEN_LOOKS)[0]:
        try:
            urllib.request.urlopen(f"{url}/health")
        except urllib.error.URLError:  # it loads, or does not listen yet
            time.sleep(SECONDS_BETWEEN_LOOKS)
        else:
            return
    ray.get(serving)  # raises what ended it


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Servers on the nodes of a Ray cluster.",
        epilog="Any other options are those of trueline serve.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a directory that every node has under this name")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="of each server; 0: one CPU")
    parser.add_argument("--port", type=int, default=8000, help="on every node; 0: a free one")
    given, options = parser.parse_known_args()

    ray.init()  # the cluster that runs, or one on this machine
    serving = {}
    for actor in place(given.servers, given.gpus):
        host, port = ray.get(actor.address.remote(given.port))
        running = actor.serve.remote(given.model, host, port, options)
        serving[running] = f"http://{host}:{port}", actor
    for running, (url, _) in serving.items():
        wait_until_ready(url, running)
        print(f"ready {url}", flush=True)
    left = list(serving)
    while left:  # the load balancer's health checks find one that is lost
        (ended,), left = ray.wait(left)
        print(f"lost {serving[ended][0]}", flush=True)


if __name__ == "__main__":
    main()
