"""Dense MLP, and routed experts with a shared one beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from trueline.layers.context import Build, Weights
from trueline.spec.feedforward import DenseSpec, MoESpec


class MLP:
    def __init__(self, build: Build, weights: Weights, name: str) -> None:
        self.ops = build.ops
        gate, up, down = (
            weights.stored(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")
        )
        self.packed = self.ops.mlp.pack(torch.cat((gate, up)), down, self.ops.linear)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ops.mlp.run(x, self.packed, self.ops.linear)
        return y


class Dense:
    def __init__(self, spec: DenseSpec, build: Build, weights: Weights, name: str) -> None:
        self.mlp = MLP(build, weights, name)
        self.collective = build.collective

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.collective.add(self.mlp.forward(x)), None


class MoE:
    def __init__(self, spec: MoESpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.collective = spec, build.ops, build.collective
        self.router = self.ops.linear.pack(weights.take(f"{name}.gate.weight").float())
        self.bias: Tensor | None = None
        if spec.router.correction_bias:
            self.bias = weights.take(f"{name}.gate.e_score_correction_bias")
        gate_up = weights.stored(f"{name}.experts.gate_up_proj")
        down = weights.stored(f"{name}.experts.down_proj")
        self.experts = self.ops.experts.pack(gate_up, down, self.ops.linear)
        self.shared = MLP(build, weights, f"{name}.shared_experts") if spec.shared_width else None

    def forward(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The output, and the experts chosen (so that they can be recorded)."""
        logits = self.ops.linear.run(x.float(), self.router)
        ids, weights = self.ops.route.run(logits, self.bias, self.spec.router, forced)
        y = self.ops.experts.run(
            x, ids, weights, self.experts, self.ops.linear, first=self.spec.experts.start
        )
        if self.shared is not None:
            y = y + self.shared.forward(x)
        return self.collective.add(y), ids
