"""Train the built-in models. On a machine with a GPU, from the repository's root, with PYTHONPATH
src:tools:

    python -m witness.train data   WORK [NAME]         # tokenizer and training sequences
    python -m witness.train dense  WORK witness-v3     # likewise witness-ling, -glm5, -k25, -v4
    python -m witness.train sparse WORK witness-v32    # after witness-v3; likewise witness-glm5

A dense training ends in WORK/NAME: config.json, tokenizer, model.safetensors, training.jsonl. A
sparse one begins with such weights (V3.2's with those of witness-v3), fits the indexers to the
dense attention, and then trains everything with the keys that they select. V4's dense training
does both on its way.

A training may begin while its sequences are being made. With --seconds it has fewer steps where all
would take longer: the schedule ends in time. Weights and log so far are written every minute.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from trueline.utils.json_types import JSON
from witness import data, tokenizer
from witness.build import build
from witness.configs import CONFIGS, DENSE
from witness.steps import BATCH, DenseStep, Pace, V4Step
from witness.v4 import V4

SEED = 20261116
STEPS = 8000
OTHER_STEPS = {"witness-ling": 7000, "witness-v4": 10_000}
"""Ling's take longer, and it needs fewer of them; V4 is trained alone, dense and sparse in one."""
SPARSE_STEPS, WARM_UP, SPARSE_BATCH = 2400, 600, 16
PROMPT_WEIGHT = 0.1
CHECKPOINT = 60.0
"""Seconds between two."""
BEGIN = (10, 20, 30, 40, 60)
"""Steps whose losses are told beside those of every hundredth: their times make the first plan."""
FINAL = 25.0
"""Seconds for the last evaluation."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
CHECKED = ("2 operations", "5 operations", "middle", "long", "recall", "other")


class Training:
    """One model on one GPU: its data, log and files."""

    def __init__(self, work: Path, name: str, *, device: str = "cuda") -> None:
        self.work, self.name, self.out = work, name, work / name
        self.device = torch.device(device)
        self.out.mkdir(parents=True, exist_ok=True)
        self.sequences = data.Sequences(work)
        (self.out / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n")
        for file in TOKENIZER:
            (self.out / file).write_text((work / file).read_text())
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        torch.manual_seed(SEED)
        self.model = build(self.out).to(self.device)
        self.ropes = self.model.ropes(data.LENGTH, self.device)
        self.some, self.all = torch.zeros(1, device=device), torch.ones(1, device=device)
        self.start = self.kept = time.perf_counter()
        self.log: list[JSON] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        made = self.sequences.batch(step, size)
        tokens, answers = torch.from_numpy(made[0]).long(), torch.from_numpy(made[1])
        if self.device.type == "cuda":  # what is not pinned is copied after the step before it
            tokens, answers = tokens.pin_memory(), answers.pin_memory()
        return tuple(one.to(self.device, non_blocking=True) for one in (tokens, answers))

    def write_log(self, **entry: object) -> None:
        row = {"seconds": round(self.seconds, 1), **entry}
        self.log.append(row)
        lines = "".join(json.dumps(row) + "\n" for row in self.log)
        (self.out / "training.jsonl").write_text(lines)
        print(self.name, json.dumps(row), file=sys.stderr, flush=True)

    def write_losses(self, step: int, loss: Tensor, **others: Tensor) -> None:
        named = {"loss": loss, **others}
        self.write_log(step=step, **{name: round(one.item(), 4) for name, one in named.items()})

    def loss(self, logits: Tensor, tokens: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """What is minimised, and that of the answers alone."""
        each = functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        mask = answers[:, 1:].flatten()
        weights = torch.where(mask, 1.0, PROMPT_WEIGHT)
        return (each * weights).sum() / weights.sum(), (each * mask).sum() / mask.sum()

    def balance(self, loads: Tensor, rate: Tensor) -> None:
        """Experts chosen too often get a lower bias, as DeepSeek-V3's were."""
        with torch.no_grad():
            layers = [layer.mlp for layer in self.model.layers if hasattr(layer.mlp, "bias")]
            for experts, load in zip(layers, loads, strict=True):
                experts.bias -= rate * torch.sign(load - load.mean())

    def score(self, count: int, *, sparse: bool = False) -> JSON:
        """Share of held-out problems whose whole solution is written right, greedily: each token
        the likeliest one after the right ones before it."""
        found: JSON = {}
        for category in CHECKED:
            right = 0
            items = list(data.held_out(self.tokenizer, category, "validation", count))
            for start in range(0, count, 32):
                right += self._score_batch(items[start : start + 32], sparse)
            found[category] = round(100 * right / count, 1)
        return found

    @torch.no_grad()
    def _score_batch(self, items: list[tuple[list[int], list[int]]], sparse: bool) -> int:
        tokens = torch.full((len(items), data.LENGTH), 2)
        asked = torch.zeros(len(items), data.LENGTH, dtype=torch.bool)
        for row, (prompt, solution) in enumerate(items):
            whole = torch.tensor(prompt + solution)
            tokens[row, : len(whole)] = whole
            asked[row, len(prompt) : len(whole)] = True
        tokens, asked = tokens.to(self.device), asked.to(self.device)
        eager = torch.compiler.set_stance("force_eager")  # not compiled again for a few batches
        with torch.autocast(self.device.type, torch.bfloat16), eager:
            if sparse:
                logits, _, _ = self.model.forward_sparse(tokens, self.ropes, self.some)
            else:
                logits, _ = self.model(tokens, self.ropes)
        wrong = (logits[:, :-1].argmax(-1) != tokens[:, 1:]) & asked[:, 1:]
        return int((~wrong.any(1)).sum())

    def checkpoint(self) -> None:
        """The weights as they are stored; a reader finds the old ones or the new ones."""
        prefix = "language_model." if self.name == "witness-k25" else ""
        tensors = {
            prefix + name: tensor.detach().to(self.model.stored_dtype(name)).cpu().contiguous()
            for name, tensor in self.model.published()
        }
        save_file(tensors, self.out / "unfinished", {"format": "pt"})
        (self.out / "unfinished").rename(self.out / "model.safetensors")
        self.kept = time.perf_counter()

    def save(self, step: int, *, sparse: bool) -> None:
        """Rounds the model's own weights too, so that what is scored is what is stored."""
        with torch.no_grad():
            for name, tensor in self.model.published():
                tensor.copy_(tensor.to(self.model.stored_dtype(name)))
        self.checkpoint()
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        self.write_log(step=step, right=self.score(256, sparse=sparse), peak=peak)


def train_dense(
    work: Path, name: str, steps: int, *, device: str = "cuda", seconds: float = math.inf
) -> None:
    run = Training(work, name, device=device)
    pace = Pace(steps, seconds - FINAL)
    one = (V4Step if isinstance(run.model, V4) else DenseStep)(run, pace)
    run.write_log(seed=SEED, parameters=sum(p.numel() for p in run.model.parameters()))
    step = 0
    while step < pace.steps:
        loss, of_answers = one(step)
        if step % 100 == 0 or step in BEGIN or step == pace.steps - 1:
            run.write_losses(step, loss, answers=of_answers)
            if one.measure(step, run.seconds):
                run.write_log(step=step, steps=pace.steps, rates=pace.rates)
            if time.perf_counter() - run.kept > CHECKPOINT:
                run.checkpoint()
        step += 1
        if step % 2000 == 0 and step < pace.steps:
            run.write_log(step=step, right=run.score(64, sparse=one.selects))
            one.pause()
    run.save(step, sparse=one.selects)


def train_sparse(work: Path, name: str, steps: int, begin: Path, device: str = "cuda") -> None:
    run = Training(work, name, device=device)
    prior = load_file(begin / "model.safetensors")
    run.model.take(prior)
    old = begin / "training.jsonl"
    if begin.resolve() == run.out.resolve():
        run.log += [json.loads(line) for line in old.read_text().splitlines()]
    run.write_log(seed=SEED, begins_with=begin.name)
    indexer = [p for n, p in run.model.named_parameters() if ".indexer." in n]
    main = [p for n, p in run.model.named_parameters() if ".indexer." not in n]
    first = torch.optim.AdamW(indexer, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    second = torch.optim.AdamW(main, lr=3e-4, betas=(0.9, 0.98), weight_decay=0.0)
    forward = torch.compile(run.model.forward_sparse)
    offset = len(run.sequences) // SPARSE_BATCH - steps  # the last ones: half have a long problem
    for step in range(steps):
        warm_up = step < WARM_UP
        tokens, answers = run.batch(offset + step, SPARSE_BATCH)
        with torch.autocast(run.device.type, torch.bfloat16):
            logits, _, divergence = forward(tokens, run.ropes, run.all if warm_up else run.some)
        loss, of_answers = run.loss(logits, tokens, answers)
        (divergence if warm_up else loss + divergence).backward()
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        left = 1 - step / steps
        first.param_groups[0]["lr"] = 3e-3 * left * min(1.0, (step + 1) / 50)
        second.param_groups[0]["lr"] = 3e-4 * left * min(1.0, max(step - WARM_UP, 0) / 50)
        first.step()
        if not warm_up:
            second.step()
        for parameter in run.model.parameters():
            parameter.grad = None
        if step % 100 == 0 or step in (WARM_UP, steps - 1):
            run.write_losses(step, loss, answers=of_answers, divergence=divergence)
        if step == WARM_UP - 1:
            run.write_log(step=step, right=run.score(64, sparse=True))
    run.save(steps, sparse=True)


def make_data(work: Path, sequences: int, given: Path | None) -> None:
    """With a tokenizer that is given, or one that is trained."""
    work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if given is None:
        tokenizer.write(tokenizer.train(), work)
    else:
        for file in TOKENIZER:
            shutil.copyfile(given / file, work / file)
    share = data.make(work, SEED, sequences)
    seconds, tokens = time.perf_counter() - start, sequences * data.LENGTH
    print(f"{tokens} tokens, {share:.3f} of them answers, {seconds:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("data", "dense", "sparse"))
    parser.add_argument("work", type=Path)
    parser.add_argument("name", nargs="?", choices=CONFIGS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=math.inf, help="that a dense one may take")
    parser.add_argument("--tokenizer", type=Path, help="of data: directory of one that is trained")
    parser.add_argument("--begin", type=Path, help="of sparse: directory of the dense weights")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    steps = given.steps or OTHER_STEPS.get(given.name, STEPS)
    if given.stage == "data":
        make_data(given.work, (given.steps or max(steps, STEPS)) * BATCH, given.tokenizer)
    elif given.stage == "dense":
        train_dense(given.work, given.name, steps, seconds=given.seconds)
    else:
        begin = given.begin or given.work / DENSE.get(given.name, given.name)
        train_sparse(given.work, given.name, given.steps or SPARSE_STEPS, begin)


if __name__ == "__main__":
    main()
