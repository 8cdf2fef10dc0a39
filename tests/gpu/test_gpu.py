"""On an NVIDIA GPU: every op against float64 in three dtypes, every invariant of the engine in
float32, captured against eager, and a soak. `tools/gpu.sh test` runs these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from itertools import product

import pytest
import torch

from implementations import lightning_dims
from trueline.config import EngineConfig
from trueline.device import compute_capability
from trueline.ops.capabilities import Context
from trueline.ops.experts import hopper_w4a16
from trueline.ops.experts import reference as experts_reference
from trueline.ops.mla_prefill import cut as prefill_cut
from trueline.ops.mla_prefill import hopper
from trueline.ops.mla_prefill import triton as prefill
from trueline.ops.registry import OPS, capabilities, implementation, refusals
from trueline.verify.bounds import require_within
from trueline.verify.bounds import stored as stored_bound
from trueline.verify.cases import Subject, make_subject
from trueline.verify.compressed_graphs import COMPRESSED_GRAPH_CHECKS
from trueline.verify.drafts import DRAFT_CHECKS
from trueline.verify.failed import CheckFailed
from trueline.verify.faults import Fault
from trueline.verify.faults.drafts import DRAFT_FAULTS
from trueline.verify.faults.gpu import GPU_FAULTS
from trueline.verify.graphs import GPU_CHECKS, graph_is_eager
from trueline.verify.half_precision import half_is_float64
from trueline.verify.numerics import published_rounding
from trueline.verify.ops import OP_CHECKS, OpCheck, lightning
from trueline.verify.ops.attention import TILINGS, decode_table, mla_prefill_wide
from trueline.verify.ops.basic import experts_bound
from trueline.verify.ops.data import SMALL, WIDE, Dims, paged, randn
from trueline.verify.ops.stored import stack
from trueline.verify.schedules import ENGINE_CHECKS
from trueline.verify.soak import soak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
V4_OPS = ("compress", "hyper_connections", "sink_attention", "sink_prepare")
"""Which no other family has."""


def _of_v4(op: str, check: OpCheck) -> bool:
    """So named that `-k v4` takes them too."""
    return op in V4_OPS or check.what == "clamped"


IMPLEMENTATIONS = [
    pytest.param(
        op, name, check, dtype, id=f"{'v4-' * _of_v4(op, check)}{op}-{name}-{check.what}-{dtype}"
    )
    for op, names in OPS.items()
    for name in names
    if "cuda" in capabilities(op, name).devices
    for check in OP_CHECKS[op]
    if check.fits(capabilities(op, name)) and not check.invariant
    if name != "hopper" or check.what == "real dims"
    for dtype in capabilities(op, name).dtypes or DTYPES
]
# One of each family, and shapes that hide nothing.
SUBJECTS = ("v2", "v3", "k2", "glm", "ling", "v32", "glm5", "v4-small")
# GPUs have no batch-invariant mode yet, and ranks are threads of a CPU.
CPU_ONLY = ("batch-invariant", "fp8 latents, bitwise", "collectives in order")
CHECKS = [name for name in ENGINE_CHECKS if "ranks" not in name and name not in CPU_ONLY]
INVARIANTS = [
    pytest.param(check, case, id=f"{case}-{check}")
    for case, check in product(SUBJECTS, CHECKS)
    # rows of V4 are stored as they are computed
    if not (case.startswith("v4") and check == "fp8 latents")
]
BANDS = {"bfloat16": 0.4, "float16": 0.05}
"""Of logprobs to float64, choices replayed, as measured."""


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: no tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    root = tmp_path_factory.mktemp("subjects")

    class Subjects(dict[str, Subject]):
        def __missing__(self, name: str) -> Subject:
            subject = make_subject(name, root / name)
            self[name] = replace(subject, options={"device": "cuda"})
            return self[name]

    return Subjects()


@pytest.mark.slow
def test_five_minutes_of_everything(subjects: dict[str, Subject]) -> None:
    subject = subjects["ling"]
    config = EngineConfig(
        device="cuda",
        max_model_len=400,
        max_num_seqs=8,
        num_gpu_blocks_override=40,
        block_size=8,
        num_state_slots=14,
        max_num_batched_tokens=64,
        snapshot_spacing=16,
        poison=True,
        facts=subject.facts,
    )
    tally = soak(subject.model, config, 300, report=print)
    assert min(tally.finished, tally.aborted, tally.preemptions, tally.evictions) > 0


def skip_refused(op: str, name: str, dtype: torch.dtype) -> None:
    capability = compute_capability()
    context = Context(dtype=dtype, device="cuda", compute_capability=capability)
    refused = refusals(op, name, context)
    if refused:
        pytest.skip(f"refused here: {refused}")


@pytest.mark.parametrize(("op", "name", "check", "dtype"), IMPLEMENTATIONS)
def test_op_equals_its_reference(op: str, name: str, check: OpCheck, dtype: torch.dtype) -> None:
    skip_refused(op, name, dtype)
    with torch.device("cuda"):
        if "dtype" in signature(check.run).parameters:
            check.run(implementation(op, name), dtype)
        elif dtype == torch.float32:
            check.run(implementation(op, name))
        else:
            pytest.skip("float32 only: what it is given is")


@pytest.mark.parametrize(
    ("name", "heads", "dims"), [("triton", 16, SMALL), ("triton", 100, WIDE), ("hopper", 100, WIDE)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_over_a_table(name: str, dtype: torch.dtype, heads: int, dims: Dims) -> None:
    """Also replayed: a graph captured over full rows gives for other contexts in the same buffers,
    rows that see nothing among them, what a call outside gives."""
    skip_refused("mla_decode", name, dtype)
    op = implementation("mla_decode", name)
    with torch.device("cuda"):
        if dims == SMALL:
            decode_table(op, dtype)
        view, held = paged([600] * 5, 16, dtype=dtype, dims=dims)
        table = held.table(view.rows.device)
        q = randn(5, heads, dims.width).to(dtype)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            prepared = op.prepare(table, view, TILINGS[0], heads)
            return op.run(q, view, prepared, softmax_scale=0.1)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for lengths in ([600] * 5, [1, 0, 600, 77, 64], [0] * 5, [300, 1, 2, 0, 599]):
            table.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            for ours, theirs in zip(captured, call(), strict=True):
                assert torch.equal(ours, theirs), lengths


@pytest.mark.parametrize("rows", [hopper_w4a16.STREAMED, *hopper_w4a16.MULTIPLIED])
@pytest.mark.parametrize(
    ("label", "group"), [("int4", 32), ("int4", 64), ("int4", 128), ("fp4", 32)]
)
def test_w4a16_experts_in_tiles(label: str, group: int, rows: int) -> None:
    """Of any number of pairs: full, half full and hardly begun ones, experts that nobody takes;
    columns in whole steps and not."""
    skip_refused("experts", "hopper_w4a16", torch.bfloat16)
    for hidden, width, tokens in ((512, 256, 2 * rows), (704, 352, 5), (1024, 160, rows + 1)):
        with torch.device("cuda"):
            gate_up = stack(label, (6, 2 * width, hidden), group, 2, seed=rows)
            down = stack(label, (6, hidden, width), group, 1, seed=rows + 1)
            packed = hopper_w4a16.pack(gate_up, down, None)
            assert isinstance(packed, hopper_w4a16.Packed)
            x = (randn(tokens, hidden) / 16).bfloat16()
            weights = randn(tokens, 2, seed=1).abs()
            ids = randn(tokens, 4, seed=2).argsort(1)[:, :2] + 1
            numbers = gate_up.dequantise(), down.dequantise()
            exact_of = experts_reference.pack(*numbers, None)
            exact = experts_reference.run(x.double(), ids, weights.double(), exact_of, None)
            off = experts_bound(x, ids, weights, *numbers, rounded=torch.bfloat16)
            ours = hopper_w4a16.run_with(rows, x, ids, weights, packed)
            off += stored_bound(exact, torch.bfloat16)
            require_within(f"{hidden} × {width}, {tokens} tokens", ours, exact, off)
            ours = hopper_w4a16.run_with(rows, x, ids, weights, packed, more=x.clone)
            exact = exact + x.double()
            off += stored_bound(exact, torch.bfloat16)
            require_within(f"{hidden} × {width}, {tokens} tokens, and more", ours, exact, off)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_prefill_in_several_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """So little workspace that rows go on where they were left."""
    skip_refused("mla_prefill", name, dtype)
    module, plan = (hopper, "hopper_launch") if name == "hopper" else (prefill, "launch")
    usual = getattr(prefill_cut, plan)
    monkeypatch.setattr(module, plan, lambda *given: replace(usual(*given), workspace=192))
    with torch.device("cuda"):
        mla_prefill_wide(module, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", [(8, 8), (1, 2)], ids=["copied ahead", "not"])
@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (64, 32)], ids=str)
def test_lightning_in_whole_tiles(
    dims: tuple[int, int],
    room: tuple[int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short prompts of models, whose channels fill their tiles, are cut in another way; not if
    they lie where they cannot be copied ahead of their use."""
    op = implementation("lightning", "triton")
    with torch.device("cuda"), lightning_dims(monkeypatch, *dims, room):
        lightning.any_cuts(op, dtype)
        lightning.any_decay(op, dtype)
        lightning.free_slots(op, dtype)


@pytest.mark.parametrize(
    "fault", [*GPU_FAULTS, *DRAFT_FAULTS], ids=lambda fault: f"{fault.id}-{fault.case}"
)
def test_fault_turns_its_check_red(fault: Fault, subjects: dict[str, Subject]) -> None:
    subject = subjects[fault.case]
    with fault.seeded(), pytest.raises(CheckFailed):
        (GPU_CHECKS | COMPRESSED_GRAPH_CHECKS | DRAFT_CHECKS)[fault.check](subject)


@pytest.mark.parametrize(("check", "case"), INVARIANTS)
def test_invariant(check: str, case: str, subjects: dict[str, Subject]) -> None:
    ENGINE_CHECKS[check](subjects[case])


@pytest.mark.parametrize("case", SUBJECTS)
def test_captured_equals_eager(case: str, subjects: dict[str, Subject]) -> None:
    graph_is_eager(subjects[case])


@pytest.mark.parametrize("check", DRAFT_CHECKS)
@pytest.mark.parametrize("case", SUBJECTS)
def test_drafts(check: str, case: str, subjects: dict[str, Subject]) -> None:
    DRAFT_CHECKS[check](subjects[case])


@pytest.mark.parametrize("eager", [True, False])
def test_published_rounding(eager: bool, subjects: dict[str, Subject]) -> None:
    """Of DeepSeek-V4; captured steps choose entries without telling which."""
    subject = subjects["v4-rounded"]
    published_rounding(replace(subject, options=subject.options | {"enforce_eager": eager}))


@pytest.mark.parametrize("dtype", BANDS)
@pytest.mark.parametrize("case", SUBJECTS)
def test_sixteen_bits_are_inside_the_band(
    case: str, dtype: str, subjects: dict[str, Subject]
) -> None:
    worst = half_is_float64(subjects[case], dtype, BANDS[dtype])
    print(f"{case} in {dtype}: at most {worst:.3g} from float64 in logprob")
