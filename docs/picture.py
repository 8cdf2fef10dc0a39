"""The picture of docs/architecture.md: boxes, and the path of a request through them. `make docs`
writes it; a test keeps it current, and every file that it names must exist."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1080, 800
LINE = 17
COLOURS = {
    "text": ("#eef4fb", "#5b87b8"),
    "core": ("#edf7ee", "#5a9a60"),
    "device": ("#fdf3e7", "#c08a3e"),
    "load": ("#f4f0fa", "#8a70b5"),
    "proof": ("#f5f5f5", "#888888"),
}


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    kind: str
    title: str
    lines: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Below src/trueline."""

    def svg(self) -> str:
        fill, edge = COLOURS[self.kind]
        x, y = self.x + self.width // 2, self.y + 20
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"/>',
            text(x, y, self.title, weight="bold"),
        ]
        for number, line in enumerate(self.lines, 1):
            parts.append(text(x, y + LINE * number, line, size=12))
        for number, name in enumerate(self.files, 1 + len(self.lines)):
            parts.append(text(x, y + LINE * number, name, size=12, family="monospace", fill=edge))
        return "\n".join(parts)


@dataclass(frozen=True)
class Arrow:
    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    number: int | None = None
    """The step in "the life of a request"."""

    def svg(self) -> str:
        way = " ".join(f"{x},{y}" for x, y in self.points)
        parts = [
            f'<polyline points="{way}" fill="none" stroke="#444444" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        ]
        x, y = self.at
        if self.number is not None:
            parts.append(f'<circle cx="{x}" cy="{y - 4}" r="9" fill="#444444"/>')
            parts.append(text(x, y, str(self.number), size=12, fill="#ffffff", weight="bold"))
            x += 14
        if self.label:
            parts.append(text(x, y, self.label, size=12, anchor="start"))
        return "\n".join(parts)


def text(
    x: int,
    y: int,
    words: str,
    *,
    size: int = 14,
    weight: str = "normal",
    family: str = "sans-serif",
    fill: str = "#222222",
    anchor: str = "middle",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" font-family="{family}" '
        f'fill="{fill}" text-anchor="{anchor}">{escape(words)}</text>'
    )


BOXES = (
    Box(300, 20, 220, 62, "text", "HTTP front end", (), ("server/app.py", "server/routes.py")),
    Box(560, 20, 220, 62, "text", "LLM, LLMEngine", ("your program",), ("llm.py",)),
    Box(300, 130, 480, 78, "text", "Text side",
        ("tokenizer and chat template in; detokenizer and stop strings out",
         "one object a request, with all its sequences"),
        ("output_processor.py   text/",)),
    Box(300, 266, 480, 146, "core", "EngineCore: token ids in, token ids out", (),
        ("engine/core.py",)),
    Box(316, 318, 216, 80, "core", "Scheduler",
        ("hands out a token budget,", "decode rows first"), ("engine/scheduler.py",)),
    Box(548, 318, 216, 80, "core", "Block and slot pools",
        ("who holds what;", "prefix cache by hash"), ("cache/pool.py",)),
    Box(300, 470, 480, 62, "device", "Executor and runner",
        ("launch a step; collect its result later",),
        ("engine/executor.py   engine/runner.py",)),
    Box(300, 572, 226, 96, "device", "Step input",
        ("rows as tensors; decode steps", "replayed as CUDA graphs"),
        ("engine/inputs.py", "engine/graphs.py")),
    Box(554, 572, 226, 96, "device", "Decoder",
        ("layers call ops by contract,", "each with a float64 reference"),
        ("layers/decoder.py", "ops/registry.py")),
    Box(300, 708, 226, 78, "device", "KV cache, states, index keys",
        ("state kinds: paged per token,", "or a slot per sequence"), ("cache/kinds/__init__.py",)),
    Box(554, 708, 226, 78, "device", "Sampling",
        ("a draw is a function of", "(seed, position, token)"), ("ops/sampling/__init__.py",)),
    Box(20, 130, 220, 78, "load", "Model family",
        ("reads config.json, once", "and strictly"), ("models/__init__.py",)),
    Box(20, 266, 220, 62, "load", "ModelSpec", ("what the model is; frozen",),
        ("spec/model.py",)),
    Box(20, 386, 220, 78, "load", "Plan",
        ("which implementation runs, and", "why; memory; sizes. Printed"),
        ("plan/plan.py",)),
    Box(20, 522, 220, 62, "load", "Weights", ("every tensor used once",), ("weights/load.py",)),
    Box(840, 266, 220, 96, "proof", "Reference",
        ("each family as a formula in", "float64; shares no code", "with the rest"),
        ("reference/model.py",)),
    Box(840, 470, 220, 96, "proof", "Verify",
        ("checks that compare the two,", "and faults that show that", "each check can fail"),
        ("verify/checks.py",)),
)  # fmt: skip
ARROWS = (
    Arrow(((410, 82), (410, 130)), "prompt, sampling parameters", (424, 110), 1),
    Arrow(((670, 82), (670, 130))),
    Arrow(((470, 208), (470, 266)), "CoreRequest", (376, 244), 2),
    Arrow(((610, 266), (610, 208)), "CoreOutput: new tokens", (626, 244), 8),
    Arrow(((532, 358), (548, 358))),
    Arrow(((470, 412), (470, 470)), "Admission, StepMessage", (308, 446), 4),
    Arrow(((610, 470), (610, 412)), "StepResult", (626, 446), 7),
    Arrow(((413, 532), (413, 572))),
    Arrow(((526, 620), (554, 620))),
    Arrow(((667, 668), (667, 708)), "logits", (683, 694)),
    Arrow(((554, 650), (540, 650), (540, 747), (526, 747))),
    Arrow(((780, 747), (800, 747), (800, 501), (780, 501)), "tokens", (806, 640)),
    Arrow(((130, 208), (130, 266))),
    Arrow(((130, 328), (130, 386))),
    Arrow(((130, 464), (130, 522))),
    Arrow(((240, 425), (270, 425), (270, 501), (300, 501))),
    Arrow(((240, 553), (284, 553), (284, 690), (600, 690), (600, 668))),
    Arrow(((950, 362), (950, 470))),
    Arrow(((840, 501), (812, 501), (812, 340), (780, 340))),
)
NOTES = (
    (130, 110, "at load"), (950, 257, "the second opinion"),
)  # fmt: skip
NUMBERS = ((332, 336, 3), (320, 592, 5), (574, 592, 6))
"""Steps that happen inside a box."""


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" '
        'fill="#444444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for y, words in ((227, "process boundary when served"), (431, "plain messages only")):
        parts.append(
            f'<line x1="300" y1="{y}" x2="800" y2="{y}" stroke="#aaaaaa" stroke-dasharray="5 4"/>'
        )
        parts.append(text(824, y + 4, words, size=11, fill="#777777", anchor="start"))
    parts += [box.svg() for box in BOXES]
    parts += [arrow.svg() for arrow in ARROWS]
    parts += [text(x, y, words, size=12, fill="#555555") for x, y, words in NOTES]
    for x, y, number in NUMBERS:
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="9" fill="#444444"/>')
        parts.append(text(x, y, str(number), size=12, fill="#ffffff", weight="bold"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def named_files() -> list[str]:
    return [name for box in BOXES for line in box.files for name in line.split()]
