"""Reports as `trueline verify` could write them. No number here was measured."""

from __future__ import annotations

import math

from trueline.verify.report import (
    Alternative,
    Band,
    Check,
    Curve,
    Environment,
    FaultRow,
    Measure,
    Model,
    Place,
    Power,
    Report,
    Status,
    TokenDiff,
)

HOSTILE = "</script><b>&\"'\x1b[31m\x00\u202e[bold]{{7*7}}]]>\ud800"
PARTS = ("entry", "mixer", "selection", "experts", "feed forward")
MODES = (
    "mixed step",
    "one-token tail",
    "ragged context",
    "empty context",
    "block edge",
    "chunk edge",
    "tile edge",
    "window edge",
    "prefix hit",
    "preempt and resume",
    "n = 4",
    "abort storm",
)
NO_GPU = "no CUDA device here"


def environment(**changes: object) -> Environment:
    facts: dict[str, object] = {
        "trueline": "0.9.0",
        "commit": "0123456789ab",
        "python": "3.12.4",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "platform": "Linux x86_64",
        "cpu": "a CPU with AVX-512",
        "threads": 2,
        "native": "AVX-512, bfloat16",
        "gpu": None,
        "driver": None,
    }
    return Environment(**(facts | changes))  # type: ignore[arg-type]


def model(layers: int = 4, name: str = "witness-v3") -> Model:
    return Model(
        name=name,
        family="deepseek_v3",
        dtype="bfloat16",
        layers=layers,
        parameters=7_914_240,
        bytes=15_829_000,
        fingerprint="4f1c" * 8,
    )


def wave(index: int, low: float = 1e-3, spread: float = 0.35) -> float:
    """Numbers that differ, the same in each run."""
    return low * math.exp(spread * math.sin(1.7 * index) + 0.03 * (index % 29))


def check(name: str, status: Status = Status.PASSED, index: int = 0, **more: object) -> Check:
    value = wave(index)
    measures = [Measure(name="relative error", value=value, band=value * 0.8, gate=value * 4)]
    facts: dict[str, object] = {
        "id": name,
        "invariant": name.partition("/")[2],
        "what": f"what {name} says",
        "status": status,
        "ran": {"attention": "native", "experts": "native"},
        "measures": [] if status == Status.NOT_COVERED else measures,
        "seconds": 0.2 + index % 5,
    }
    return Check(**(facts | more))  # type: ignore[arg-type]


def curve(title: str, along: str, values: list[float], labels: list[str] | None = None) -> Curve:
    band = [wave(i, 8e-4, 0.1) for i in range(len(values))]
    return Curve(
        title=title,
        along=along,
        labels=labels or [str(i) for i in range(len(values))],
        values=values,
        band=band,
        gate=[4 * each for each in band],
    )


def passing(layers: int = 4) -> Report:
    checks = [check("preflight/facts", measures=[]), check("preflight/ledger", measures=[])]
    checks += [check(f"ops/{op}", index=i) for i, op in enumerate(("norm", "rope", "attention"))]
    checks += [
        check(f"layers/{part}", index=i, measures=[_layer_measure(i, layers)])
        for i, part in enumerate(PARTS)
    ]
    checks += [check(f"logits/{name}", index=i) for i, name in enumerate(("KL mean", "KL p99.9"))]
    checks += [check(f"modes/{mode}", index=i) for i, mode in enumerate(MODES)]
    for name in ("captured", "capture size - 1", "capture size + 1"):
        checks.append(check(f"modes/{name}", Status.NOT_COVERED, evidence=NO_GPU))
    ranks = check("modes/two ranks", Status.NOT_COVERED, evidence="one process was asked for")
    return Report(
        model=model(layers),
        tier="standard",
        command="trueline verify witness-v3 --device cpu --html verify.html",
        options={"device": "cpu"},
        started="2026-03-01T09:30:00Z",
        seconds=84.2,
        environment=environment(),
        plan=[
            "device       cpu (a CPU with AVX-512), memory of the machine",
            "compute      bfloat16 (as the checkpoint)",
            "attention    native (fits, and is the fastest here)",
            "experts      native (fits, and is the fastest here)",
        ],
        checks=[*checks, ranks],
        bands=[
            Band(what=part, dtype="bfloat16", value=wave(i), gate=4 * wave(i))
            for i, part in enumerate(PARTS)
        ],
        curves=_curves(layers),
        power=_power(layers),
    )


def _layer_measure(index: int, layers: int) -> Measure:
    value = wave(index)
    place = Place(layer=index % layers, part=PARTS[index], position=index)
    return Measure(name="worst row", value=value, band=value, gate=4 * value, place=place)


def _curves(layers: int) -> list[Curve]:
    found = [
        curve(part, "layer", [wave(i + 3 * n, 7e-4) for i in range(layers)])
        for n, part in enumerate(PARTS)
    ]
    found.append(curve("logits, prefill", "position", [wave(i % 97, 5e-4) for i in range(311)]))
    found.append(curve("logits, decode", "position", [wave(i, 5e-4) for i in range(24)]))
    names = list(MODES)
    worst = [0.0 if i % 3 else wave(i, 4e-4) for i in range(len(names))]
    return [*found, curve("logits against those alone", "composition", worst, names)]


def _power(layers: int) -> list[Power]:
    found = [
        Power(
            place=Place(layer=layer, part="mixer", op="attention", implementation="native"),
            what="softmax scale too large by this factor",
            smallest=2.0 ** -(8 + layer % 3),
            unseen=2.0 ** -(9 + layer % 3),
            caught_by="layers/mixer",
            named=Place(layer=layer, part="mixer"),
        )
        for layer in range(layers)
    ]
    found += [
        Power(
            place=Place(layer=layer, part="experts"),
            what="weight of the first expert, of its size",
            smallest=2.0**-6 if layer != 1 else None,
            unseen=2.0**-7 if layer != 1 else 0.5,
            caught_by="layers/experts" if layer != 1 else None,
            named=Place(layer=max(layer - 1, 0)) if layer != 1 else None,
        )
        for layer in range(layers)
    ]
    return found


def failing(layers: int = 4, wrong: int = 3) -> Report:
    """Decode is wrong from one layer on."""
    report = passing(layers)
    place = Place(
        layer=wrong,
        part="mixer",
        op="attention",
        implementation="native",
        composition="mixed step",
        request=2,
        position=17,
        path="decode",
        block=5,
    )
    by_id = {each.id: each for each in report.checks}
    mixed = by_id["modes/mixed step"]
    mixed.status, mixed.place = Status.FAILED, place
    mixed.measures = [
        Measure(name="worst row", value=0.41, band=8.1e-4, gate=3.2e-3, place=place),
        Measure(name="tokens that differ", value=3.0, gate=0.0, place=place),
    ]
    mixed.evidence = (
        "request 2, position 17, decode: worst row 0.41, accepted 3.2e-3\n"
        "  ours      0.1201 -0.3310  0.0042 …\n"
        "  reference 0.2003 -0.1177  0.0511 …\n"
        "the same request alone agrees to 7.7e-4: the rows beside it change it"
    )
    mixed.replay = "verify-failures/mixed step.replay"
    storm = by_id["modes/abort storm"]
    storm.status, storm.measures = Status.ERROR, []
    storm.evidence = "RuntimeError: block 5 was freed twice"
    values = [wave(i, 7e-4) * (1 if i < wrong else 500) for i in range(layers)]
    report.curves.insert(0, curve("mixer, decode", "layer", values))
    report.curves.append(
        curve("logits, mixed step", "position", [wave(i, 5e-4) + 0.4 * (i > 16) for i in range(40)])
    )
    report.token_diffs = [
        TokenDiff(
            place=Place(composition="mixed step", request=2, position=17, path="decode"),
            before="Tom has 3 apples and buys 4 more. 3 + 4 =",
            ours=[
                Alternative(12, " 9", -0.3),
                Alternative(13, " 7", -1.6),
                Alternative(4, "\n", -4.0),
            ],
            reference=[
                Alternative(13, " 7", -0.02),
                Alternative(12, " 9", -5.1),
                Alternative(19, " 12", -6.0),
            ],
            kl=1.84,
        )
    ]
    return report


def with_faults() -> Report:
    report = passing()
    report.faults = [
        FaultRow(
            id=f"fault-{i}",
            what=f"what is wrong with {i}",
            outcome="caught",
            caught_by="layers/mixer",
            invariant="layer = reference",
            layer=str(i % 4) if i % 5 else "all",
            position=i,
        )
        for i in range(30)
    ]
    report.faults += [
        FaultRow(
            id="decode-rows-shifted",
            what="outputs of decode rows shifted by one row",
            outcome="survived",
            evidence="every check passed",
        ),
        FaultRow(
            id="index-keys-stale", what="index keys", outcome="no effect", evidence="no indexer"
        ),
        FaultRow(id="graph-stale-input", what="graphs", outcome="not here", evidence=NO_GPU),
    ]
    return report


def huge(checks: int = 4) -> Report:
    """61 layers of so many checks each."""
    report = failing(61, wrong=37)
    report.model = model(61, "a model of 61 layers")
    for layer in range(61):
        for index in range(checks):
            place = Place(layer=layer, part=PARTS[index % 5])
            value = wave(layer + index)
            measure = Measure(
                name="worst row", value=value, band=value, gate=4 * value, place=place
            )
            name = f"layer {layer}/check {index}"
            report.checks.append(check(name, index=index, measures=[measure]))
    report.curves += [
        curve(f"check {index}", "layer", [wave(i * index, 6e-4) for i in range(61)])
        for index in range(1, 9)
    ]
    report.curves.append(
        curve("long context", "position", [wave(i % 89, 5e-4) for i in range(8192)])
    )
    return report


def empty() -> Report:
    """Nothing could be checked."""
    report = passing()
    return Report(
        model=report.model,
        tier="smoke",
        only=["ranks"],
        options={},
        started=report.started,
        seconds=0.1,
        environment=environment(triton=None, commit=None),
        plan=[],
        checks=[check("ranks/two", Status.NOT_COVERED, evidence="one process was asked for")],
    )


def not_finite() -> Report:
    """As an overflow leaves it."""
    report = failing()
    nan, inf = math.nan, math.inf
    mixed = next(each for each in report.checks if each.id == "modes/mixed step")
    mixed.measures = [
        Measure(name="worst row", value=nan, band=8e-4, gate=3.2e-3),
        Measure(name="largest", value=inf, gate=65504.0),
        Measure(name="smallest", value=-inf),
    ]
    report.curves = [
        curve("with NaN", "layer", [1e-3, nan, inf, 0.0]),
        curve("nothing but NaN", "layer", [nan] * 4),
        curve("exact", "position", [0.0] * 9),
        curve("nothing", "composition", []),
        curve("of each", "composition", [nan, inf, 0.0, 1e-3], ["a", "b", "c", "d"]),
    ]
    report.bands = [Band(what="mixer", dtype="bfloat16", value=nan, gate=inf)]
    return report


def hostile() -> Report:
    """Every text is what somebody else wrote."""
    report = failing()
    bad = HOSTILE
    report.model = model(name=bad)
    report.tier, report.options, report.plan = bad, {bad: bad}, [bad]
    report.only, report.command, report.started = [bad], bad, bad
    report.environment = environment(gpu=bad, driver=bad, cpu=bad, commit=bad)
    place = Place(part=bad, op=bad, implementation=bad, composition=bad, path=bad)
    measures = [Measure(name=bad, value=1.0, gate=0.5, place=place)]
    report.checks = [
        check(f"{bad}/{bad}", Status(status), what=bad, evidence=bad, place=place, replay=bad)
        for status in Status
    ]
    for each in report.checks:
        each.measures, each.ran = measures, {bad: bad}
    report.curves = [
        curve(bad, along, [1.0, 2.0], [bad, bad]) for along in ("layer", "composition")
    ]
    report.bands = [Band(what=bad, dtype=bad, value=1.0, gate=2.0)]
    report.token_diffs = [
        TokenDiff(
            place=place,
            before=bad,
            ours=[Alternative(1, bad, -1.0)],
            reference=[Alternative(2, bad, -math.inf)],
            kl=1.0,
        )
    ]
    report.power = [
        Power(place=place, what=bad, smallest=0.5, unseen=None, caught_by=bad, named=place)
    ]
    report.faults = [
        FaultRow(id=bad, what=bad, outcome=outcome, caught_by=bad, layer=bad, evidence=bad)
        for outcome in ("caught", "survived", bad)
    ]
    return report


ALL = {
    each.__name__: each
    for each in (passing, failing, with_faults, huge, empty, not_finite, hostile)
}
