"""What is written beside trained weights, and the last look at them:

    python -m witness.finish WORK DESTINATION [NAME ...]

The reference's logits against the training code's at every position of held-out problems; how many
problems the reference and the engine solve; the loss curve. Stops where the first two disagree.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from trueline import LLM, SamplingParams, reference
from trueline.evaluate.statistics import wilson
from trueline.tasks import stories
from trueline.utils.json_types import JSON
from witness import data
from witness.build import build, exact_logprobs
from witness.configs import CONFIGS
from witness.steps import BATCH
from witness.train import SEED, SPARSE_BATCH, SPARSE_STEPS, STEPS

GATE = 2e-5
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
COUNTS = {**dict.fromkeys(stories.ARITHMETIC, 250), "long": 300, "recall": 200, "other": 200,
          "1 operation": 200}  # fmt: skip
"""Problems of the test split that the engine answers; a fifth of them for the reference."""
COMPARED = {"5 operations": 4, "long": 2, "recall": 1, "other": 1}


def held_out(path: Path, category: str, count: int) -> list[tuple[list[int], list[int]]]:
    known = Tokenizer.from_file(str(path / "tokenizer.json"))
    return list(data.held_out(known, category, "test", count))


def disagreement(path: Path, model: reference.Reference) -> float:
    """Largest difference in logprob between training code and reference, both in float64."""
    trained = build(path)
    stored = load_file(path / "model.safetensors")
    trained.take({key.removeprefix("language_model."): one for key, one in stored.items()})
    worst = 0.0
    for category, count in COMPARED.items():
        for prompt, solution in held_out(path, category, count):
            tokens = torch.tensor(prompt + solution)
            difference = exact_logprobs(trained, tokens) - model.logprobs(tokens)
            worst = max(worst, float(difference.abs().max()))
    return worst


def of_the_reference(path: Path, model: reference.Reference) -> JSON:
    """Whole solutions, each token the likeliest after the right ones before it."""
    found: JSON = {}
    for category, count in COUNTS.items():
        items = held_out(path, category, count // 5)
        right = 0
        for prompt, solution in items:
            logits = model.logits(prompt + solution)[len(prompt) - 1 : -1]
            right += logits.argmax(-1).tolist() == solution
        found[category] = {"right": right, "problems": len(items)}
        print(path.name, "reference", category, found[category], file=sys.stderr)
    return found


def of_the_engine(path: Path) -> JSON:
    """Answers that are right, greedily, in batches as they come."""
    llm = LLM(str(path), max_model_len=2048, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=160)
    found: JSON = {}
    for category, count in COUNTS.items():
        problems = stories.problems(category, "test", count)
        asked = [[{"role": "user", "content": one.question}] for one in problems]
        outputs = llm.chat(asked, params, use_tqdm=False)
        right = sum(
            stories.is_right(one.answer, out.outputs[0].text)
            for one, out in zip(problems, outputs, strict=True)
        )
        found[category] = {"right": right, "problems": count}
        print(path.name, "engine", category, found[category], file=sys.stderr)
    arithmetic = [found[category] for category in stories.ARITHMETIC]
    found["2 to 5 operations"] = {
        "right": sum(each["right"] for each in arithmetic),
        "problems": sum(each["problems"] for each in arithmetic),
    }
    for each in found.values():
        low, high = wilson(each["right"] / each["problems"], each["problems"])
        each["interval"] = [round(low, 4), round(high, 4)]
    return found


def draw_losses(path: Path, log: list[JSON]) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = path.name  # the same bytes every time
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    starts = [i for i, row in enumerate(log) if row.get("step") == 0 and "loss" in row]
    offset = 0
    for start, stop in zip(starts, [*starts[1:], len(log)], strict=True):
        rows = [row for row in log[start:stop] if "loss" in row]
        steps = [offset + row["step"] for row in rows]
        sparse = "divergence" in rows[0]
        for key, colour in (("loss", "tab:blue"), ("answers", "tab:orange")):
            label = {"loss": "all tokens", "answers": "answers"}[key] if not offset else None
            axes.plot(steps, [row[key] for row in rows], color=colour, label=label)
        if sparse:
            axes.axvline(offset, color="grey", linestyle=":", label="sparse attention from here")
        offset = steps[-1]
    axes.set(yscale="log", xlabel="step", ylabel="loss", title=path.name)
    axes.legend(frameon=False)
    figure.savefig(path / "loss.svg", metadata={"Date": None})
    pyplot.close(figure)


def finish(work: Path, destination: Path, name: str) -> None:
    path = destination / name
    path.mkdir(parents=True, exist_ok=True)
    for file in COPIED:
        shutil.copyfile(work / name / file, path / file)
    greedy = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(greedy, indent=1) + "\n")
    log = [json.loads(line) for line in (work / name / "training.jsonl").read_text().splitlines()]
    (path / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    draw_losses(path, log)
    model = reference.load(path)
    worst = disagreement(path, model)
    if worst > GATE:
        raise SystemExit(f"{name}: training code and reference differ by {worst:.1e}; gate {GATE}")
    scores = {
        "model": name,
        "seed": SEED,
        "steps": STEPS if model.config.indexer is not None else log[-1]["step"],
        "sequences_a_step": BATCH,
        "tokens_a_sequence": data.LENGTH,
        **({"sparse_steps": SPARSE_STEPS, "sparse_sequences_a_step": SPARSE_BATCH}
           if model.config.indexer is not None else {}),
        "training_code_minus_reference": worst,
        "reference_float64": of_the_reference(path, model),
        "engine_cpu": of_the_engine(path),
    }  # fmt: skip
    (path / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")


if __name__ == "__main__":
    made, target, *names = sys.argv[1:]
    for each in names or CONFIGS:
        finish(Path(made), Path(target), each)
