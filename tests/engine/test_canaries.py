"""Writes that no step may make are found, and told where; what steps may write raises no alarm."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from plug_ins import plug_in
from servers import serving
from trueline.cache.kinds.latent import Latent
from trueline.cache.kinds.lightning import LightningState
from trueline.cache.parts import Part
from trueline.cache.pool import NULL
from trueline.config import EngineConfig
from trueline.engine.canaries.guard import Canaries
from trueline.engine.canaries.pools import Pool
from trueline.engine.canaries.report import CanaryHit, CanaryReport
from trueline.engine.core import EngineCore
from trueline.engine.executor import local_runner
from trueline.engine.loading import load_engine
from trueline.engine.messages import CoreRequest, StepMessage
from trueline.engine.params import SamplingParams
from trueline.engine.runner import Runner
from trueline.errors import CANARY_HIT, EngineBroken
from trueline.plugins import API_VERSION
from trueline.verify.canaries import findings, report_of, watched
from trueline.verify.cases import make_subject
from trueline.verify.failed import CheckFailed
from trueline.verify.faults.canaries import CANARY_FAULTS
from trueline.verify.ranks import serve_on_ranks
from trueline.verify.schedules import ENGINE_CHECKS, MIXED, base, prompt

Tiny = Callable[..., Path]
BASE = EngineConfig(
    max_model_len=400, max_num_seqs=4, num_gpu_blocks_override=70, block_size=8, canary_interval=1
)
# Every kind of cache, in every layout.
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("deepseek_v3", {}),
    "latents in fp8": ("deepseek_v3", {"kv_cache_dtype": "fp8", "kv_cache_group_size": 16}),
    "keys": ("deepseek_v32", {}),
    "keys in fp8": ("deepseek_v32", {"index_cache_dtype": "e4m3fn"}),
    "keys, planar": (
        "deepseek_v32",
        {"index_cache_dtype": "e4m3fn", "index_cache_layout": "planar"},
    ),
    "keys, shuffled": (
        "deepseek_v32",
        {"index_cache_dtype": "e4m3fn", "index_cache_layout": "shuffled", "block_size": 16},
    ),
    "states": ("bailing_moe_v2_5", {}),
    "states with tails": ("bailing_moe_v2_5", {"batch_invariant": True, "block_size": 64}),
    "windows and entries": ("deepseek_v4", {"index_cache_dtype": "e4m3fn"}),
}


def canaries_of(core: EngineCore) -> Canaries:
    found = local_runner(core.executor).canaries
    assert found is not None
    return found


def ask(core: EngineCore, name: str, tokens: list[int], count: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    core.add(CoreRequest(request_id=name, prompt_token_ids=tokens, params=params))


@pytest.fixture(scope="module")
def running(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineCore]:
    """By what it keeps: an engine in the middle of things. "a" has ended and is cached, "b" has
    ended and is not, "c" runs."""
    made: dict[str, EngineCore] = {}

    def engine(name: str) -> EngineCore:
        if name not in made:
            family, options = KEPT[name]
            directory = str(tmp_path_factory.mktemp("reports"))
            config = replace(BASE, canary_report_dir=directory, **options)
            core = made[name] = load_engine(tiny(family), config).core
            ask(core, "a", prompt(140), 3)
            ask(core, "c", prompt(150, 1), 200)
            for _ in range(6):
                core.step()
            ask(core, "b", prompt(5, 2), 2)
            for _ in range(6):
                core.step()
        return made[name]

    return engine


def as_it_should_be(canaries: Canaries) -> None:
    canaries._look(everything=True).settle()


@contextmanager
def changed(part: Part, layer: int, place: int, row: int) -> Iterator[None]:
    """One byte, and back again."""
    within = part.words.shape[3]
    words = part.words[layer, place, row // within, row % within]
    index = (words.shape[0] - 1,) + (0,) * (words.dim() - 1)
    before = words[index].clone()
    words[index] ^= 0x40
    try:
        yield
    finally:
        words[index] = before


def hit(canaries: Canaries) -> CanaryReport:
    with pytest.raises(CanaryHit) as caught:
        as_it_should_be(canaries)
    return caught.value.report


def known_places(pool: Pool) -> dict[str, int]:
    """Of each sort of place one whose sums are known, by what a report is to say of it."""
    places = pool.places
    if pool.noun == "row":
        return {"nobody ever writes it": 0}
    found = {
        **({"null": NULL} if places.first[NULL] == 0 else {}),
        "behind the last": places.count - 1,
        "no request has ever": int(((places.writer < 0) & (places.known > 0)).nonzero()[2]),
    }
    full = (places.writer >= 0) & (places.known == places.positions)
    wrote = "no row of these steps" if pool.noun == "slot" else f"0 to {places.positions - 1} were"
    if bool(full.any()):  # of tails, that depends on where prompts end
        found[wrote] = int(full.nonzero()[0])
    if pool.noun == "slot":
        del found["no request has ever"]
    else:
        part = (places.known > 0) & (places.known < places.positions)
        for place in part.nonzero().flatten().tolist():
            if places.known[place] * pool.kept[0].sums.part.num_rows >= places.positions:
                found[f"0 to {int(places.known[place]) - 1} were"] = place
    return found


@pytest.mark.parametrize("name", KEPT)
def test_a_byte_is_found_wherever_it_is(name: str, running: Callable[[str], EngineCore]) -> None:
    """In the null place, behind the last one, in one that is full or as far as it is written, and
    where nobody has ever written: by kind, layer, part, place and row; nothing else is told."""
    core = running(name)
    canaries = canaries_of(core)
    assert not canaries.unguarded
    as_it_should_be(canaries)
    draw, tried = random.Random(name), 0
    for pool in canaries.pools:
        for words, place in known_places(pool).items():
            for kept in pool.kept:
                part = kept.sums.part
                stop = int(pool.places.known[place]) * part.num_rows // pool.places.positions
                if not stop:
                    continue  # not one entry is complete
                row, layer = draw.randrange(stop), draw.randrange(len(part.words))
                with changed(part, layer, place, row):
                    report = hit(canaries)
                (found,) = report.hits
                assert found.change is not None
                assert (found.kind, found.place, found.noun) == (kept.kind.name, place, pool.noun)
                assert found.change.layer == kept.kind.layers[layer]
                assert (found.change.part, found.change.row) == (part.name, row)
                assert found.change.byte == part.byte(place, row)
                assert words in found.why
                with pytest.raises(CanaryHit):  # it is back: a change too
                    as_it_should_be(canaries)
                as_it_should_be(canaries)
                tried += 1
    kinds = {each.kind.name for pool in canaries.pools for each in pool.kept}
    assert tried >= 4 * len(kinds)


@pytest.mark.parametrize("name", ["latents", "keys", "states", "windows and entries"])
def test_the_null_place_is_guarded(name: str, running: Callable[[str], EngineCore]) -> None:
    """All of it where steps are not captured, so that none has padding; but not where the ends of
    prompts go there."""
    core = running(name)
    for pool in canaries_of(core).pools:
        ends = pool.group is not None and core.plan.groups[pool.group].keeps_ends
        assert int(pool.places.first[NULL]) == ends * pool.places.positions, pool.name


def test_several_rows_are_told_as_such(running: Callable[[str], EngineCore]) -> None:
    """Also where they have changed by the same, which their middle would have."""
    canaries = canaries_of(running("latents"))
    as_it_should_be(canaries)
    (pool, *_) = canaries.pools
    part = pool.kept[0].sums.part
    place = int(pool.places.count - 1)
    for rows in ((1, 3), (0, 1, 2), (2, 6)):
        words = part.words[0, place]
        before = words.clone()
        words[list(rows)] += 5
        (found,) = hit(canaries).hits
        assert found.change is not None
        assert found.change.row is None
        words.copy_(before)
        with pytest.raises(CanaryHit):
            as_it_should_be(canaries)


def stepped_until_broken(core: EngineCore, most: int) -> tuple[int, EngineBroken]:
    for number in range(1, most + 1):
        try:
            core.step()
        except EngineBroken as error:
            return number, error
    raise AssertionError(f"{most} steps, and nobody complained")


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_engine_stops(
    overlap: bool, interval: int, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within an interval, before the tokens of the step after which it is found; with who ran since
    it was right, on a file too."""
    config = replace(
        BASE, overlap=overlap, canary_interval=interval, canary_report_dir=str(tmp_path)
    )
    core = load_engine(tiny("deepseek_v3"), config).core
    canaries = canaries_of(core)
    ask(core, "first", prompt(21), 3)
    while core.has_unfinished():
        core.step()
    ask(core, "second", prompt(9, 1), 100)
    ask(core, "third", prompt(30, 2), 100)
    while canaries.number % interval or canaries.number < 10:
        core.step()
    before = canaries.number
    (pool, *_) = canaries.pools
    part, place = pool.kept[0].sums.part, int((pool.places.writer == 0).nonzero()[0])
    core.executor.worker.submit(lambda: part.words[1, place, 2, 0, 0].add_(1)).result()
    steps, error = stepped_until_broken(core, interval + 2)
    assert steps <= interval + overlap
    assert CANARY_HIT in str(error)
    report = report_of(error)
    assert report is not None
    assert report.interval == interval
    assert before < report.step <= before + interval
    (found,) = report.hits
    assert found.change is not None
    assert (found.kind, found.place, found.noun) == ("latent", place, "block")
    assert (found.change.layer, found.change.row) == (1, 2)
    assert found.writer == "first"
    assert found.holders == ["first (ended)"]
    assert found.implementations == {"latent_write": core.plan.selections["latent_write"].name}
    assert found.clean_step == report.step - interval
    assert [each.step for each in report.steps] == [*range(found.clean_step + 1, report.step + 1)]
    for each in report.steps:
        assert [row.request for row in each.rows] == ["second", "third"]
        assert all(row.is_decode for row in each.rows)
    assert set(report.tables) == {"second", "third"}
    (file,) = tmp_path.iterdir()
    told = next(each.message for each in caplog.records if each.message.startswith(CANARY_HIT))
    for words in (str(file), "second (decode)", "first (ended)", "latent_write", "layer 1"):
        assert words in told
    assert "second" not in str(error), "a client is told of no other's requests"
    assert msgspec.json.decode(file.read_bytes(), type=CanaryReport) == report
    with pytest.raises(EngineBroken):
        core.step()
    core.close()  # what it would find was found


@pytest.mark.parametrize("interval", [1, 4])
def test_a_look_that_fails_is_none(
    interval: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory runs out: its step fails, and what was to be known is not."""
    config = replace(BASE, canary_interval=interval, overlap=False)
    core = load_engine(tiny("bailing_moe_v2_5"), config).core
    sums, failing = Part.sums, [False]

    def failed(self: Part, places: torch.Tensor) -> torch.Tensor:
        if failing[0] and self.name == "state":
            failing[0] = False
            raise torch.OutOfMemoryError("no room for sums")
        return sums(self, places)

    monkeypatch.setattr(Part, "sums", failed)
    for turn in range(6):
        ask(core, f"r{turn}", prompt(10 + turn, turn), 9)
        failing[0] = bool(turn % 2)
        while core.has_unfinished():
            core.step()
        assert not failing[0]
    core.close()


def test_the_last_steps_are_looked_at_when_it_is_closed(tiny: Tiny, tmp_path: Path) -> None:
    config = replace(BASE, canary_interval=1000, canary_report_dir=str(tmp_path))
    core = load_engine(tiny("bailing_moe_v2_5"), config).core
    ask(core, "a", prompt(20), 3)
    while core.has_unfinished():
        core.step()
    canaries = canaries_of(core)
    (slots,) = (pool for pool in canaries.pools if pool.noun == "slot")
    slots.kept[0].sums.part.words[0, slots.places.count - 1, 0, 0] += 1
    with pytest.raises(CanaryHit, match="behind the last slot"):
        core.close()
    fine = load_engine(tiny("bailing_moe_v2_5"), config).core
    ask(fine, "a", prompt(20), 3)
    while fine.has_unfinished():
        fine.step()
    fine.close()
    assert canaries_of(fine).num_checks == 1


SOAKED: dict[str, tuple[str, dict[str, Any]]] = {
    "latents": ("v3", {"kv_cache_dtype": "fp8", "poison": True}),
    "keys": ("v32", {"index_cache_dtype": "e4m3fn", "index_cache_layout": "planar"}),
    "states": ("ling", {"num_state_slots": 6, "snapshot_spacing": 4}),
    "tails of states": ("ling", {"batch_invariant": True, "num_gpu_blocks_override": 26}),
    "windows and entries": ("v4-small", {"num_gpu_blocks_override": 24}),
}


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("name", SOAKED)
def test_no_false_alarm(name: str, interval: int, tmp_path: Path) -> None:
    """Requests come, go, are aborted and preempted at random, with beginnings in common, while the
    cache is written over several times."""
    case, options = SOAKED[name]
    draw = random.Random(f"{name} {interval}")
    config = EngineConfig(
        **{
            "max_model_len": 96, "max_num_seqs": 4, "num_gpu_blocks_override": 34, "block_size": 4,
            "max_num_batched_tokens": 24, "canary_interval": interval, "overlap": interval > 1,
        } | options
    )  # fmt: skip
    core = load_engine(make_subject(case, tmp_path / case).model, config).core
    heads = [prompt(20, 1), prompt(13, 2), []]
    names, alive = count(), set[str]()
    for _ in range(160):
        if len(alive) < 6 and draw.random() < 0.3:
            name = f"r{next(names)}"
            tokens = [*draw.choice(heads), *prompt(draw.randint(1, 30), draw.randrange(50))]
            ask(core, name, tokens, draw.randint(1, 40))
            alive.add(name)
        if alive and draw.random() < 0.04:
            name = draw.choice(sorted(alive))
            core.abort(name)
        alive -= {out.request_id for out in core.step() if out.finish_reason}
    canaries = canaries_of(core)
    core.close()
    counters = core.scheduler.counters
    assert counters.num_aborted
    pools = [*core.blocks.pools, *([core.slots] if core.slots else [])]
    assert counters.num_preemptions or any(pool.num_evictions for pool in pools)
    assert core.pool.num_hit_tokens
    assert canaries.num_checks == canaries.number // interval + 1


def test_a_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at its own memory; the others stop too."""
    subject = make_subject("v3-ranks", tmp_path / "model")
    config = replace(base(subject), canary_interval=1, canary_report_dir=str(tmp_path))
    assert len(serve_on_ranks(subject.model, MIXED, config, 2)) == 2
    launch = Runner.launch

    def stray(self: Runner, step: StepMessage) -> Any:
        canaries = self.canaries
        assert canaries is not None
        if (canaries.rank, canaries.number) == (1, 5):
            self.caches.first(Latent).rows[-1, 0] += 1
        return launch(self, step)

    monkeypatch.setattr(Runner, "launch", stray)
    with pytest.raises(CheckFailed, match="on rank 1, after step 6: latent, row 0, layer 0"):
        serve_on_ranks(subject.model, MIXED, config, 2)
    (file,) = tmp_path.glob("*-rank1-step6.json")
    assert msgspec.json.decode(file.read_bytes(), type=CanaryReport).rank == 1


def test_what_a_kind_does_not_tell_is_not_guarded(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a check says so instead of passing."""
    allocate = LightningState.allocate

    def untold(self: LightningState, num_slots: int) -> Any:
        store = allocate(self, num_slots)
        told = ("views", "poison", "randomise")
        return SimpleNamespace(**{name: getattr(store, name) for name in told})

    monkeypatch.setattr(LightningState, "allocate", untold)
    core = load_engine(tiny("bailing_moe_v2_5"), replace(BASE, canary_interval=1)).core
    assert canaries_of(core).unguarded == ["lightning"]
    with pytest.raises(CheckFailed, match="not guarded: lightning"):
        watched(core, MIXED)
    off = load_engine(tiny("bailing_moe_v2_5"), replace(BASE, canary_interval=0)).core
    assert local_runner(off.executor).canaries is None
    assert off.executor.num_canary_checks == 0
    with pytest.raises(CheckFailed, match="nothing was looked at"):
        watched(off, MIXED)


def test_findings_are_those_of_canaries_alone(tmp_path: Path) -> None:
    subject = make_subject("v3", tmp_path / "model")
    assert findings(subject.model, MIXED, base(subject)) is None
    (fault,) = (each for each in CANARY_FAULTS if each.id == "latent-over-the-zeros")
    with fault.seeded():
        report = findings(subject.model, MIXED, base(subject))
    assert report is not None
    assert {hit.why for hit in report.hits} == {"nobody ever writes it"}


ALONE = (
    "latent-over-the-zeros",
    "snapshot-written-again",
    "null-slot-written",
)
"""Faults that no other check of the engine sees."""
OTHERS = (
    *("engine oracle", "split = whole", "solo = batch", "prefix = cold", "preempt = resume"),
    *("poison", "overlapped = plain", "steady state"),
)


@pytest.mark.slow
@pytest.mark.parametrize("id", ALONE)
def test_nobody_else_sees_it(id: str, tmp_path: Path) -> None:
    (fault,) = (each for each in CANARY_FAULTS if each.id == id)
    subject = make_subject(fault.case, tmp_path / "model")
    subject = replace(subject, options=subject.options | {"canary_interval": 0})
    for check in OTHERS:
        with fault.seeded():
            ENGINE_CHECKS[check](subject)


STRAY = f"""
from trueline.ops.latent_write import composed
api_version = {API_VERSION}
capabilities = composed.capabilities
calls = []
def run(latent, key, queries, view, cells, **given):
    calls.append(1)
    wide = composed.run(latent, key, queries, view, cells, **given)
    if len(calls) > 30:
        view.rows[view.zero_cell - 5] = 1.0
    return wide
"""


@pytest.mark.slow
def test_a_server_that_was_hit_is_started_again(tiny: Tiny, tmp_path: Path) -> None:
    """The request gets an error, which the log and a file explain; metrics count it."""
    paths = plug_in(tmp_path, "stray_plug", "latent_write.stray", STRAY)
    reports = tmp_path / "reports"
    reports.mkdir()
    flags = (
        *("--op", "latent_write=stray", "--canary-interval", "4"),
        *("--canary-report-dir", str(reports), "--on-engine-death", "restart"),
    )
    ask = {"prompt": "true to the", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    with serving(tiny("deepseek_v3"), *flags, PYTHONPATH=paths) as served:
        short = served.post("/v1/completions", json=ask | {"max_tokens": 4})
        assert short.status_code == 200
        answer = served.post("/v1/completions", json=ask)
        assert answer.json()["error"]["code"] == "engine_dead"
        assert CANARY_HIT in answer.json()["error"]["message"]
        served.wait_for("behind the last block")
        end = time.monotonic() + 60
        while served.get("/health/ready").status_code != 200 and time.monotonic() < end:
            time.sleep(0.1)
        assert served.metric("trueline:canary_hits_total") == 1
        assert served.metric("trueline:canary_checks_total") == 0
        assert served.post("/v1/completions", json=ask | {"max_tokens": 4}).status_code == 200
        assert served.metric("trueline:canary_checks_total") >= 1
    (file,) = reports.iterdir()
    report = msgspec.json.decode(file.read_bytes(), type=CanaryReport)
    assert report.hits[0].implementations == {"latent_write": "stray"}
