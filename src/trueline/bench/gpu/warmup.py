"""Whether kernels are compiled after the server says that it is ready, and how long it takes to.

    python -m trueline.bench.gpu.warmup [MODEL...]  # random weights; default: all three

Starts `trueline serve` with an empty kernel cache, sends 1, 7, 64 and 200 streams at a time with
prompts of 37 to 20,000 tokens, counts the kernels in the cache before and after, and does the same
once more with what is in the cache then. A JSON line a model; 1 where a kernel was compiled late or
a request failed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trueline.bench.overhead.processes import SECONDS_TO_END, Served
from trueline.tiny.tokenizer import write_word_tokenizer
from trueline.utils.json_types import JSON

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("v2lite", "ling25s", "v32s")
ROUNDS = {1: 6, 7: 2, 64: 1, 200: 1}
"""Of each number of streams."""
SHORTEST, LONGEST = 37, 20_000
ANSWER = 64
SECONDS = 120.0
"""After which a round has failed."""


def main(names: list[str]) -> int:
    failed = False
    for name in names or MODELS:
        found = measure(CONFIGS / name)
        for each in found.values():
            failed |= bool(each["late"] or each["late_metric"] != 0 or each["errors"])
        print(json.dumps({"model": name, **found}), flush=True)
    return int(failed)


def measure(model: Path) -> JSON:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch:
        cache, tokenizer = Path(scratch) / "kernels", Path(scratch) / "tokenizer"
        cache.mkdir()
        tokenizer.mkdir()
        write_word_tokenizer(tokenizer, vocabulary)
        return {kind: started(model, tokenizer, cache, vocabulary) for kind in ("cold", "warm")}


def started(model: Path, tokenizer: Path, cache: Path, vocabulary: int) -> JSON:
    with served(model, tokenizer, cache) as (ready, server):
        before = kernels(cache)
        start = time.monotonic()
        loads = [load(server.url, streams, vocabulary) for streams in ROUNDS]
        seconds = time.monotonic() - start
        late = {path: name for path, name in kernels(cache).items() if path not in before}
        return {
            **ready,
            "kernels": len(before),
            "late": sorted(late.values()),
            "late_metric": late_metric(server.url),
            "errors": [error for found in loads for error in found.pop("errors")],
            "seconds": round(seconds, 1),
            "loads": loads,
        }


@contextmanager
def served(model: Path, tokenizer: Path, cache: Path) -> Iterator[tuple[JSON, Served]]:
    start = time.monotonic()
    more = ("--load-format", "dummy", "--tokenizer", str(tokenizer))
    server = Served(
        str(model), {}, *more, environment={**os.environ, "TRITON_CACHE_DIR": str(cache)}
    )
    try:
        server.wait()
        ready = {"ready_s": round(time.monotonic() - start, 1), "said": server.said("ready in")}
        ready["warned"] = server.said("compiled ahead")
        yield ready, server
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(SECONDS_TO_END)


def kernels(cache: Path) -> dict[str, str]:
    """Entries of the cache and their names."""
    return {str(file.parent): file.stem for file in cache.glob("*/*.cubin")}


def late_metric(url: str) -> float | None:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r"^\S*:late_kernels_total\S* (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


def load(url: str, streams: int, vocabulary: int) -> JSON:
    rng = random.Random(streams)
    gaps: list[float] = []
    firsts: list[float] = []
    errors: list[str] = []
    for number in range(ROUNDS[streams]):
        lengths = [lengthened((i + 0.5) / streams, number, rng) for i in range(streams)]
        prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]
        for outcome in asyncio.run(together(url, prompts)):
            if isinstance(outcome, BaseException):
                errors.append(repr(outcome)[:300])
                continue
            firsts.append(outcome[0])
            gaps += outcome[1:]
    return {
        "streams": streams,
        "worst_first_token_ms": round(1e3 * max(firsts, default=0)),
        "worst_gap_ms": round(1e3 * max(gaps, default=0)),
        "errors": errors,
    }


def lengthened(place: float, number: int, rng: random.Random) -> int:
    """From the shortest to the longest, even on a logarithmic scale; a single stream has the ends
    and what lies between, one after the other."""
    at = (place + number / 5) % 1.0001 if number else place
    at = min(max(at + rng.uniform(-0.02, 0.02), 0.0), 1.0)
    return round(SHORTEST * math.pow(LONGEST / SHORTEST, at))


async def together(url: str, prompts: list[list[int]]) -> list[list[float] | BaseException]:
    wanted = (asyncio.wait_for(stream(url, prompt), SECONDS) for prompt in prompts)
    return await asyncio.gather(*wanted, return_exceptions=True)


async def stream(url: str, prompt: list[int]) -> list[float]:
    """Seconds to the first token, and from each to the next."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": prompt, "max_tokens": ANSWER, "stream": True, "ignore_eos": True}
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    last, times = time.monotonic(), []
    status = await reader.readline()
    text = status
    async for line in reader:
        if line.startswith(b"data: {"):
            now = time.monotonic()
            times.append(now - last)
            last = now
        elif b" 200 " not in status:
            text += line
    writer.close()
    if b" 200 " not in status or len(times) < 2:
        raise RuntimeError(text[-300:].decode())
    return times


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
