"""Train the built-in models. On a machine with a GPU, from the repository's root, with PYTHONPATH
src:tools:

    python -m witness.train data   WORK [NAME]         # tokenizer and training sequences
    python -m witness.train dense  WORK witness-v3     # likewise witness-ling, -glm5, -k25, -v4
    python -m witness.train sparse WORK witness-v32    # after witness-v3; likewise witness-glm5

A dense training ends in WORK/NAME: config.json, tokenizer, model.safetensors, training.jsonl. A
sparse one begins with such weights (V3.2's with those of witness-v3), fits the indexers to the
dense attention, and then trains everything with the keys that they select. V4's dense training
does both on its way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from trueline.utils.json_types import JSON
from witness import data, tokenizer
from witness.build import build
from witness.configs import CONFIGS, DENSE
from witness.optimiser import Optimiser
from witness.v4 import V4

SEED = 20261116
STEPS, BATCH = 8000, 32
OTHER_STEPS = {"witness-ling": 7000, "witness-v4": 10_000}
"""Ling's take longer, and it needs fewer of them; V4 is trained alone, dense and sparse in one."""
SPARSE_STEPS, WARM_UP, SPARSE_BATCH = 2400, 600, 16
INDEXED, SELECTED = 0.55, 0.65
"""V4's training: share of the steps before its indexers are fitted, and before they select."""
PROMPT_WEIGHT = 0.1
BIAS_RATE = 1e-3
CHECKED = ("2 operations", "5 operations", "middle", "long", "recall", "other")


class Training:
    """One model on one GPU: its data, log and files."""

    def __init__(self, work: Path, name: str, *, device: str = "cuda") -> None:
        self.work, self.name, self.out = work, name, work / name
        self.device = torch.device(device)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(CONFIGS[name], indent=1) + "\n")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (self.out / file).write_text((work / file).read_text())
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.tokens = np.load(work / "tokens.npy", mmap_mode="r")
        self.answers = np.load(work / "answers.npy", mmap_mode="r")
        torch.manual_seed(SEED)
        self.model = build(self.out).to(self.device)
        self.ropes = self.model.ropes(data.LENGTH, self.device)
        self.some, self.all = torch.zeros(1, device=device), torch.ones(1, device=device)
        self.start = time.perf_counter()
        self.log: list[JSON] = []

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        rows = [row % len(self.tokens) for row in range(step * size, (step + 1) * size)]
        tokens = torch.from_numpy(self.tokens[rows].astype(np.int64))
        answers = torch.from_numpy(self.answers[rows])
        if self.device.type == "cuda":  # what is not pinned is copied after the step before it
            tokens, answers = tokens.pin_memory(), answers.pin_memory()
        return tuple(one.to(self.device, non_blocking=True) for one in (tokens, answers))

    def write_log(self, **entry: object) -> None:
        row = {"seconds": round(time.perf_counter() - self.start, 1), **entry}
        self.log.append(row)
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

    def save(self) -> None:
        """Rounds the model's own weights too, so that what is scored is what is stored."""
        tensors = {}
        with torch.no_grad():
            for name, tensor in self.model.published():
                stored = tensor.detach().to(self.model.stored_dtype(name))
                tensor.copy_(stored)
                prefix = "language_model." if self.name == "witness-k25" else ""
                tensors[prefix + name] = stored.cpu().contiguous().clone()
        save_file(tensors, self.out / "model.safetensors", {"format": "pt"})

    def finish(self) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in self.log)
        (self.out / "training.jsonl").write_text(lines)


class DenseStep:
    """One step of a dense training; on a GPU it is captured, since its kernels are so small that
    launching them takes longer."""

    def __init__(self, run: Training, steps: int) -> None:
        self.run, self.steps = run, steps
        self.optimiser = Optimiser(run.model, muon=0.02, adam=2e-3)
        self.forward = run.model.compile_for_training()
        self.clipped = [p for n, p in run.model.named_parameters() if ".indexer." not in n]
        self.bias_rate = torch.zeros((), device=run.device)
        self.tokens, self.answers = run.batch(0, BATCH)
        self.restart()

    def restart(self) -> None:
        """Before a step that is not like the one before."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 3  # compiled, and the optimiser's state made, before the capture

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The step's loss, and that of the answers alone."""
        tokens, answers = self.run.batch(step, BATCH)
        self.tokens.copy_(tokens)
        self.answers.copy_(answers)
        self.optimiser.set(step, self.steps)
        self.bias_rate.fill_(BIAS_RATE * (1 - step / self.steps))
        if self.run.device.type != "cuda":
            self._step()
        elif self.eager:
            self.eager -= 1
            self._on_side_stream()
        elif self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            self.graph.replay()
        else:
            self.graph.replay()
        return self.losses

    def _on_side_stream(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)

    def _step(self) -> None:
        run = self.run
        with torch.autocast(run.device.type, torch.bfloat16, cache_enabled=False):
            logits, loads, divergence = self.outputs()
        loss, of_answers = run.loss(logits, self.tokens, self.answers)
        (loss + divergence).backward()
        torch.nn.utils.clip_grad_norm_(self.clipped, 1.0)
        self.optimiser.step()
        run.balance(loads, self.bias_rate)
        self.losses = loss.detach(), of_answers.detach()

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        logits, loads = self.forward(self.tokens, self.run.ropes)
        return logits, loads, self.run.some[0]


class V4Step(DenseStep):
    """The same, with indexers from some step on: first fitted to what attention looks at, then
    selecting what it sees."""

    def __init__(self, run: Training, steps: int) -> None:
        self.first, self.selecting = int(INDEXED * steps), int(SELECTED * steps)
        self.sparse = False
        self.everything = torch.ones(1, device=run.device)
        super().__init__(run, steps)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        if step == self.first:
            self.sparse = True
            self.restart()
        if step == self.selecting:
            self.everything.zero_()
        return super().__call__(step)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.sparse:
            return super().outputs()
        return self.run.model.forward_sparse(self.tokens, self.run.ropes, self.everything)


def train_dense(work: Path, name: str, steps: int, device: str = "cuda") -> None:
    run = Training(work, name, device=device)
    v4 = isinstance(run.model, V4)
    one = (V4Step if v4 else DenseStep)(run, steps)
    run.write_log(seed=SEED, parameters=sum(p.numel() for p in run.model.parameters()))
    for step in range(steps):
        loss, of_answers = one(step)
        if step % 100 == 0 or step == steps - 1:
            run.write_losses(step, loss, answers=of_answers)
        if step % 1000 == 999 and step != steps - 1:
            run.write_log(step=step, right=run.score(64, sparse=v4 and step > SELECTED * steps))
    run.save()
    run.write_log(
        step=steps, right=run.score(256, sparse=v4), peak=torch.cuda.max_memory_allocated()
    )
    run.finish()


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
    offset = len(run.tokens) // SPARSE_BATCH - steps  # the last ones: half have a long problem
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
    run.save()
    run.write_log(
        step=steps, right=run.score(256, sparse=True), peak=torch.cuda.max_memory_allocated()
    )
    run.finish()


def make_data(work: Path, sequences: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    tokenizer.write(tokenizer.train(), work)
    tokens, answers = data.sequences(work / "tokenizer.json", SEED, sequences)
    np.save(work / "tokens.npy", tokens)
    np.save(work / "answers.npy", answers)
    seconds, share = time.perf_counter() - start, answers.mean()
    print(f"{tokens.size} tokens, {share:.3f} of them answers, {seconds:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=("data", "dense", "sparse"))
    parser.add_argument("work", type=Path)
    parser.add_argument("name", nargs="?", choices=CONFIGS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--begin", type=Path, help="of sparse: directory of the dense weights")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    steps = given.steps or OTHER_STEPS.get(given.name, STEPS)
    if given.stage == "data":
        make_data(given.work, (given.steps or max(steps, STEPS)) * BATCH)
    elif given.stage == "dense":
        train_dense(given.work, given.name, steps)
    else:
        begin = given.begin or given.work / DENSE.get(given.name, given.name)
        train_sparse(given.work, given.name, given.steps or SPARSE_STEPS, begin)


if __name__ == "__main__":
    main()
