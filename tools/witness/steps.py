"""One step of a dense training, and how many of them there are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from witness.optimiser import Optimiser

if TYPE_CHECKING:
    from witness.train import Training

BATCH = 32
BIAS_RATE = 1e-3
INDEXED, SELECTED = 0.55, 0.65
"""V4's training: share of the steps before its indexers are fitted, and before they select."""
TRIED = 21
"""V4's first steps have indexers too: then it is known whether that compiles, and what it takes."""
COMPILED = 3
"""Steps before the capture, in which everything is compiled and the optimiser's state made."""


class Pace:
    """The number of steps: those asked for, or as many as end in time."""

    def __init__(self, asked: int, seconds: float = math.inf) -> None:
        self.asked, self.steps, self.seconds = asked, asked, seconds
        self.rates: dict[str, float] = {}
        """Seconds a step, without indexers and with them."""

    def plan(self, step: int, passed: float, indexed: float) -> bool:
        """Anew, after so many seconds, for steps with indexers from that share of all on; whether
        the number is another one."""
        before, left = self.steps, self.seconds - passed
        if math.isinf(left) or "dense" not in self.rates:
            return False
        dense = self.rates["dense"]
        sparse = self.rates.get("sparse", dense)
        if step < indexed * before:
            fit = (left + step * dense) / (indexed * dense + (1 - indexed) * sparse)
        else:
            fit = step + left / sparse
        self.steps = max(step + 1, min(self.asked, int(fit)))
        return self.steps != before


class DenseStep:
    """On a GPU it is captured, since its kernels are so small that launching them takes longer."""

    indexed = 1.0
    sparse = selects = False

    def __init__(self, run: Training, pace: Pace) -> None:
        self.run, self.pace = run, pace
        self.optimiser = Optimiser(run.model, muon=0.02, adam=2e-3)
        self.on_gpu = self.captures = run.device.type == "cuda"
        self.forward = run.model.compile_for_training() if self.on_gpu else run.model
        self.clipped = [p for n, p in run.model.named_parameters() if ".indexer." not in n]
        self.bias_rate = torch.zeros((), device=run.device)
        self.tokens, self.answers = run.batch(0, BATCH)
        self.restart()

    def restart(self) -> None:
        """Before a step that is not like the one before."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.compiles = COMPILED if self.on_gpu else 0
        self.pause()

    def pause(self) -> None:
        """The next seconds are no step's."""
        self.since: tuple[int, float] | None = None

    def measure(self, step: int, passed: float) -> bool:
        """Where nothing but steps of one kind has come since it was asked before: the plan anew.
        Whether it has changed."""
        changed = False
        if self.since is not None:
            first, seconds = self.since
            kind = "sparse" if self.sparse else "dense"
            self.pace.rates[kind] = round((passed - seconds) / (step - first), 5)
            changed = self.pace.plan(step, passed, self.indexed)
        self.since = (step, passed) if not self.compiles else None
        return changed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The step's loss, and that of the answers alone."""
        tokens, answers = self.run.batch(step, BATCH)
        self.tokens.copy_(tokens)
        self.answers.copy_(answers)
        self.optimiser.set(step, self.pace.steps)
        self.bias_rate.fill_(BIAS_RATE * (1 - step / self.pace.steps))
        try:
            self._run()
        except Exception as error:  # compilers raise what they like
            self._do_without(error)
            self._run()
        return self.losses

    def _run(self) -> None:
        if not self.on_gpu:
            self._step()
        elif self.compiles or not self.captures:
            self.compiles = max(0, self.compiles - 1)
            self._on_side_stream()
        else:
            if self.graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self._step()
                self.graph = graph
            self.graph.replay()

    def _do_without(self, error: Exception) -> None:
        """Slower is better than not at all: first the compiler goes, then the capture."""
        if self.graph is not None or not self.captures:
            raise error
        if self.compiles:
            torch.compiler.set_stance("force_eager")
        else:
            self.captures = False
        without = "compiler" if self.compiles else "capture"
        self.run.write_log(without=without, error=str(error)[-2000:])
        self.optimiser.forget_gradients()
        self.restart()

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

    indexed = INDEXED

    def __init__(self, run: Training, pace: Pace) -> None:
        self.everything = torch.ones(1, device=run.device)
        self.fits = False
        super().__init__(run, pace)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        # the plan may move on: what has begun goes on
        self.fits = self.fits or step >= INDEXED * self.pace.steps
        if self.sparse != (self.fits or step < TRIED):
            self.sparse = not self.sparse
            self.restart()
        if step >= SELECTED * self.pace.steps and not self.selects:
            self.selects = True
            self.everything.zero_()
        return super().__call__(step)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.sparse:
            return super().outputs()
        return self.run.model.forward_sparse(self.tokens, self.run.ropes, self.everything)
