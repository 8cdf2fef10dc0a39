"""What layers are given, whatever the machine computes in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from trueline.cache.kinds.latent import SelectedInput
from trueline.config import EngineConfig
from trueline.engine.batch import build_batch
from trueline.engine.dry_run import Outline
from trueline.engine.graphs import DecodeGraphs, GraphKey
from trueline.engine.loading import load_engine
from trueline.engine.messages import StepMessage, StepRow
from trueline.layers import context
from trueline.layers.context import Weights
from trueline.layers.mla import MLA
from trueline.weights.value import Weight


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_kept_exact_is_handed_out_exact(compute: torch.dtype) -> None:
    """A correction bias decides near ties: it stays in float32 where all else is narrower. Whether
    this machine's plan would compute in 16 bits has no part in it."""
    exact = torch.tensor([8.0, 8.0 + 2.0**-12])
    narrow = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    values = {"bias": exact, "norm": narrow, "matrix": narrow}
    weights = Weights({name: Weight.of(value) for name, value in values.items()}, compute)
    bias = weights.take("bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, exact)
    assert weights.take("norm").dtype == compute
    assert weights.left() == ["matrix"]
    assert weights.stored("matrix").dtype == torch.bfloat16
    with pytest.raises(KeyError):
        weights.take("bias")


@pytest.mark.parametrize(("longest", "limit"), [(1, 24), (24, 24), (25, 99), (26, 99), (99, 99)])
def test_a_graph_chooses_from_the_first_row_that_must(longest: int, limit: int) -> None:
    """A row that sees topk positions takes them all; with one more it chooses."""
    graphs = object.__new__(DecodeGraphs)
    graphs.sizes, graphs.limits = [1, 2, 4], [24, 99]
    assert graphs.key_for(3, 1, longest) == GraphKey(4, 1, limit)
    assert graphs.key_for(4, 3, longest) == GraphKey(4, 3, limit)


@pytest.mark.parametrize("family", ["deepseek_v3", "bailing_moe_v2_5", "deepseek_v32"])
def test_no_layer_keeps_a_weight_that_was_packed(family: str, tiny: Callable[..., Path]) -> None:
    """It would hold the checkpoint's files open, and on a GPU a second copy. Warm-up takes layers
    apart into tensors, which such a weight does not survive."""
    loaded = load_engine(tiny(family), EngineConfig(max_model_len=64))
    for layer in loaded.core.executor.runner.decoder.layers:
        assert Outline(layer).tensors()


@pytest.mark.parametrize(("start", "limit"), [(20, 24), (21, 24), (22, 99), (23, 99), (24, 99)])
def test_a_graph_is_chosen_by_the_last_draft(start: int, limit: int) -> None:
    """Of rows of three tokens, one sees more positions than its first token does."""
    row = StepRow(
        id=0, start=start, token_ids=[1, 2, 3], tables=[[1]], is_decode=True, samples=True,
        num_drafts=2,
    )  # fmt: skip
    batch = build_batch(StepMessage(rows=[row, msgspec.structs.replace(row, start=4)]), [99])
    graphs = object.__new__(DecodeGraphs)
    graphs.sizes, graphs.limits = [2], [24, 99]
    graphs.fixed = cast("Any", SimpleNamespace(tables=[None], fill=lambda *_: None))
    assert graphs._fill(batch, {}) == GraphKey(2, 3, limit)


@pytest.mark.parametrize("at", [slice(1, 3), torch.tensor([0, 3])])
def test_listed_rows_attend_to_their_own_choices(at: slice | torch.Tensor) -> None:
    """Beside rows that attend over a mask: those have rows among the choices too."""
    seen: list[torch.Tensor] = []
    layer: Any = object.__new__(MLA)
    layer.spec, layer.expand = SimpleNamespace(softmax_scale=1.0), None

    def attend(
        q: torch.Tensor, view: object, prepared: object, chosen: torch.Tensor, **_: float
    ) -> tuple[torch.Tensor, None]:
        seen.append(chosen)
        return q, None

    sparse = SimpleNamespace(sparse_mla=SimpleNamespace(run=attend))
    layer.ops = SimpleNamespace(sparse=sparse, batched_gemm=SimpleNamespace(run=lambda out, _: out))
    chosen = torch.arange(8).reshape(4, 2)
    layer._attend_selected(torch.zeros(2), SelectedInput(slice(0, 2), at, 2, None), None, chosen)
    assert torch.equal(seen[0], chosen[at])


@pytest.mark.parametrize("other", ["block fp8", "int8", "a", "b", "c"])
def test_weights_of_two_formats_are_packed_as_dense(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one op packs together: an op of one format would not take the others."""
    monkeypatch.setattr(context, "Packing", lambda _, stored: stored)
    build = context.Build(*[cast("Any", None)] * 5)
    dense, another = (cast("Any", SimpleNamespace(format=each)) for each in ("dense", other))
    assert build.packing(another, another) == other
    assert build.packing(dense, another, another) == "dense"
    assert build.packing(another, cast("Any", SimpleNamespace(format="third"))) == "dense"
