"""Dense MLP, and routed experts with a shared one beside them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trueline.device import Branch
from trueline.errors import UsageError
from trueline.layers.context import ANYWHERE, Build, Weights
from trueline.parallel.placement import (
    Partial,
    Placement,
    PlacementError,
    Replicated,
    added,
    check_all_reduce,
    check_shape,
)
from trueline.spec.feedforward import DenseSpec, MoESpec
from trueline.spec.source import Span
from trueline.weights.value import Weight


class GatedMLP:
    def __init__(
        self,
        build: Build,
        gate_up: Weight,
        down: Weight,
        width: Span,
        name: str,
        limit: float | None = None,
    ) -> None:
        self.row_parallel, self.width = build.row_parallel, width
        _require_alike(build, name, gate_up, down)
        chosen = build.packing(gate_up, down)
        self.op, self.linear, self.invariant = chosen.mlp, chosen.linear, chosen.invariant_mlp
        self.placement = build.row_parallel.check(f"{name}.down_proj", down.shape, width)
        if not self.row_parallel.invariant_sums:
            check_all_reduce(name, self.placement, build.collective.size)
        self.packed = self.op.pack(gate_up, down, self.linear, limit)

    def part(self, x: Replicated) -> Partial:
        """What this rank has of the output, where the ranks' parts are added up."""
        return Partial(self.op.run(x, self.packed, self.linear))

    def forward(self, x: Replicated) -> Replicated:
        if not self.row_parallel.invariant_sums:
            return self.row_parallel.collective.all_reduce(self.part(x))
        mlp, packed, linear = self.invariant, self.packed, self.linear
        assert mlp is not None, "invariant sums are for batch-invariant mode only"
        middle = mlp.middle(x, packed, linear)
        out = self.row_parallel.run(middle, lambda full: mlp.down(full, packed, linear), self.width)
        return Replicated(out.to(x.dtype))


def _require_alike(build: Build, name: str, *weights: Weight) -> None:
    if build.mixes_numerics(*weights):
        raise UsageError(
            f"{name}: gate_proj, up_proj and down_proj are stored in several formats, which "
            f"numerics='{build.plan.numerics.name}' multiplies in different ways; accepted here: "
            "numerics='weights'"
        )


def _gate_up_down(weights: Weights, name: str) -> tuple[Weight, Weight]:
    gate, up, down = (
        weights.stored(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")
    )
    return Weight.concat((gate, up)), down


class Dense:
    capabilities = ANYWHERE

    def __init__(self, spec: DenseSpec, build: Build, weights: Weights, name: str) -> None:
        self.mlp = GatedMLP(build, *_gate_up_down(weights, name), spec.width, name)

    def forward(self, x: Replicated, forced: Tensor | None) -> tuple[Replicated, Tensor | None]:
        return self.mlp.forward(x), None


class MoE:
    capabilities = ANYWHERE

    def __init__(self, spec: MoESpec, build: Build, weights: Weights, name: str) -> None:
        self.spec, self.ops, self.row_parallel = spec, build.ops, build.row_parallel
        self.collective = build.collective
        router = weights.take(f"{name}.gate.weight").float()
        self.router = self.ops.route.pack(router, build.plan.compute_dtype, self.ops.linear)
        self.bias: Tensor | None = None
        if spec.router.correction_bias:
            self.bias = weights.take(f"{name}.gate.e_score_correction_bias")
        self.table: Tensor | None = None
        if spec.router.hashed:
            # [vocabulary, top_k]; `take` would make floats of it
            self.table = weights.stored(f"{name}.gate.tid2eid").dequantise().long()
        gate_up = weights.stored(f"{name}.experts.gate_up_proj")
        down = weights.stored(f"{name}.experts.down_proj")
        _require_alike(build, f"{name}.experts", gate_up, down)
        self._check_placement(name, gate_up, down, build.collective.size)
        self.shared: GatedMLP | None = None
        shared, chosen = f"{name}.shared_experts", build.packing(gate_up, down)
        self.op, self.linear, fused = chosen.experts, chosen.linear, chosen.shared_experts
        self.invariant, self.adding = chosen.invariant_experts, chosen.adding_experts
        more = _gate_up_down(weights, shared) if spec.shared_width else None
        every, limit = (gate_up, down, *(more or ())), spec.swiglu_limit
        if more and fused is not None and _fits(spec) and len({w.format for w in every}) == 1:
            self.experts = fused.pack_with_shared(gate_up, down, *more, self.linear, limit)
        else:
            self.experts = self.op.pack(gate_up, down, self.linear, limit)
            self.shared = (
                GatedMLP(build, *more, spec.shared_width, shared, limit)
                if more and spec.shared_width
                else None
            )

    def _check_placement(self, name: str, gate_up: Weight, down: Weight, size: int) -> None:
        """That experts and width are not both divided, and that the shared expert is as the routed
        ones are: one all-reduce adds up all of them."""
        spec = self.spec
        width = self.row_parallel.check(f"{name}.experts.down_proj", down.shape, spec.expert_width)
        experts = spec.experts
        for what, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            check_shape(f"{name}.experts.{what}", weight.shape[:1], experts.count)
        if self.row_parallel.invariant_sums:
            return
        parts = [width]
        if not experts.is_whole:
            if not spec.expert_width.is_whole:
                raise PlacementError(f"{name}.experts are divided whole and by width at once")
            parts = [Placement.PARTIAL]
        if spec.shared_width is not None:
            whole = spec.shared_width.is_whole
            parts.append(Placement.REPLICATED if whole else Placement.PARTIAL)
        check_all_reduce(name, added(name, *parts), size)

    def hashed(self, tokens: Tensor) -> Tensor | None:
        """A hash layer's choice for these token ids, [n, top_k]: to be forced on it. None where the
        router chooses."""
        return None if self.table is None else self.table[tokens]

    def forward(self, x: Replicated, forced: Tensor | None) -> tuple[Replicated, Tensor | None]:
        """The output, and the experts chosen (so that they can be recorded)."""
        if self.row_parallel.invariant_sums:
            ids, weights = self._route(x, forced)
            y = self._in_order(x, ids, weights)
            return y if self.shared is None else Replicated(y + self.shared.forward(x)), ids
        if self.shared is None:
            ids, weights = self._route(x, forced)
            first = self.spec.experts.start
            part = self.op.run(x, ids, weights, self.experts, self.linear, first=first)
        else:
            part, ids = self._with_shared(self.shared, x, forced)
        return self.collective.all_reduce(Partial(part)), ids

    def _with_shared(
        self, shared: GatedMLP, x: Replicated, forced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the sum, and the experts chosen. The shared expert runs beside the
        others, and not before: those are waited for longer."""
        ids, weights = self._route(x, forced)

        def more() -> Callable[[], Tensor]:
            branch = Branch()
            with branch:
                made = shared.part(x)

            def added() -> Tensor:
                branch.join()
                return made

            return added

        packed, linear, first = self.experts, self.linear, self.spec.experts.start
        if self.adding is None:
            part = self.op.run(x, ids, weights, packed, linear, first=first)
            return part + more()(), ids
        return self.adding.run_added(x, ids, weights, more, packed, linear, first=first), ids

    def _in_order(self, x: Replicated, ids: Tensor, weights: Tensor) -> Replicated:
        """A token's experts in the order of its ids, whoever holds them."""
        experts, spec = self.invariant, self.spec
        assert experts is not None, "invariant sums are for batch-invariant mode only"
        packed, linear, first = self.experts, self.linear, spec.experts.start

        def summed(middle: Tensor) -> Tensor:
            each = experts.down(middle, ids, packed, linear, first)
            if not spec.experts.is_whole:
                # what one rank has, the others have zeros for: adding rounds nothing
                each = self.collective.all_reduce(Partial(each))
            return experts.combine(each, weights)

        middle = experts.middle(x, ids, packed, linear, first)
        return Replicated(self.row_parallel.run(middle, summed, spec.expert_width).to(x.dtype))

    def _route(self, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        linear, router = self.ops.linear, self.spec.router
        return self.ops.route.choose(x, self.router, linear, self.bias, router, forced)


def _fits(spec: MoESpec) -> bool:
    """Whether the shared expert here is as wide as some number of the others."""
    width = spec.expert_width.count
    return spec.shared_width is not None and spec.shared_width.count % width == 0
