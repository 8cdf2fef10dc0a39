"""Every check of an op goes red for an implementation with a mistake in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import compressed_mistakes as wrong
from trueline.cache.store import LatentView, fp8_parts
from trueline.ops.hyper_connections import Mixed
from trueline.ops.lightning import StateRow
from trueline.ops.mla_decode import DecodeRows
from trueline.ops.registry import implementation, needed, runnable
from trueline.ops.rms_norm import cpu as rms_norm
from trueline.verify.failed import CheckFailed
from trueline.verify.faults import compressed_ops as faults
from trueline.verify.ops import FP8_CHECKS, OP_CHECKS
from trueline.verify.ops.data import WIDE
from trueline.weights.value import Weight

Function = Callable[..., Any]


@dataclass(frozen=True)
class Mistake:
    what: str
    op: str
    check: str
    function: str
    broken: Callable[[Function], Function]

    def implementation(self, name: str | None = None) -> SimpleNamespace:
        """What the engine would take here, or the one of a name, but for one function."""
        right = implementation(self.op, name or runnable(self.op, torch.float32)[0])
        declared = right.capabilities
        functions = {name: getattr(right, name) for name in needed(self.op, declared)}
        functions |= {self.function: self.broken(functions[self.function])}
        return SimpleNamespace(capabilities=declared, **functions)


def other_rows(changed: Callable[[StateRow], StateRow]) -> Callable[[Function], Function]:
    def make(prepare: Function) -> Function:
        return lambda parts: prepare([(at, changed(row)) for at, row in parts])

    return make


def undecayed(prefill: Function) -> Function:
    """The state that a chunk starts from has one decay too few."""

    def broken(q: Any, k: Any, v: Any, view: Any, parts: Any, *, slopes: Any, scale: Any) -> Any:
        for _, row in parts:
            if row.source is not None:
                view.state[row.source] *= slopes.clamp_max(50).exp()[:, None, None]
        return prefill(q, k, v, view, parts, slopes=slopes, scale=scale)

    return broken


def one_after_the_other(decode: Function) -> Function:
    """A row reads what the row before has just written."""

    def broken(q: Any, k: Any, v: Any, view: Any, prepared: Any, **options: Any) -> Tensor:
        prepare, rows = prepared
        return torch.cat([
            decode(q[[i]], k[[i]], v[[i]], view, prepare([row]), **options)
            for i, row in enumerate(rows)
        ])  # fmt: skip

    return broken


def forgotten_tail(prefill: Function) -> Function:
    """The tokens of an open tile are not kept."""

    def broken(q: Any, k: Any, v: Any, view: Any, parts: Any, **options: Any) -> Any:
        out = prefill(q, k, v, view, parts, **options)
        for _, row in parts:
            view.keys[row.slot] = 0
        return out

    return broken


def from_float16(run: Function) -> Function:
    """All numbers have lost the last half of their digits: the smallest mistake there is."""

    def less(x: Any) -> Any:
        return x.half().float() if isinstance(x, Tensor) and x.dtype == torch.float32 else x

    return lambda *given, **named: run(*map(less, given), **named)


def of_the_count(run: Function) -> Function:
    """The last bit depends on how many rows there are."""
    return lambda x, *rest, **named: run(x, *rest, **named) * (1 + 2.0**-22 * (len(x) % 7))


def of_the_columns(run: Function) -> Function:
    """The last bit depends on how many columns there are."""

    def broken(*given: Any) -> Tensor:
        y: Tensor = run(*given)
        return y * (1 + 2.0**-22 * (y.shape[-1] % 7))

    return broken


def of_the_heads(run: Function) -> Function:
    """Or how many heads."""

    def broken(q: Tensor, *given: Any, **named: Any) -> Any:
        factor, made = 1 + 2.0**-22 * (q.shape[1] % 7), run(q, *given, **named)
        return (made[0] * factor, made[1]) if isinstance(made, tuple) else made * factor

    return broken


def nothing_rotated(run: Function) -> Function:
    """Queries meet the latent alone."""

    def broken(q: Tensor, *given: Any, **named: Any) -> Any:
        q = q.clone()
        q[..., -WIDE.rope :] = 0
        return run(q, *given, **named)

    return broken


def halves_swapped(run: Function) -> Function:
    """Each consumer warp group takes the other one's columns."""

    def broken(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, lse = run(*given, **named)
        return out.roll(WIDE.latent // 2, dims=-1), lse

    return broken


def no_begun_tile(prepare: Function) -> Function:
    """Keys after the last whole tile are left out."""

    def broken(rows: DecodeRows, *given: Any) -> Any:
        kept = [max(n // 64 * 64, min(n, 64)) for n in rows.lengths]
        return prepare(replace(rows, lengths=kept), *given)

    return broken


def lse_in_bits(run: Function) -> Function:
    def broken(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, lse = run(*given, **named)
        return out, lse / math.log(2)

    return broken


def decode_of_the_count(run: Function) -> Function:
    def broken(q: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, lse = run(q, *given, **named)
        return out * (1 + 2.0**-22 * (len(q) % 7)), lse

    return broken


def one_key_short(prepare: Function) -> Function:
    """The last query's own key is left out where a chunk has a history."""

    def shorter(part: Any) -> Any:
        return replace(part, row=replace(part.row, start=max(part.row.start - 1, 0)))

    return lambda parts, *given: prepare([shorter(part) for part in parts], *given)


def keys_not_rotated(run: Function) -> Function:
    """Queries meet the part of keys that is not rotated alone."""
    return lambda q_nope, q_rope, *given, **named: run(
        q_nope, torch.zeros_like(q_rope), *given, **named
    )


def queries_of_float16(run: Function) -> Function:
    return lambda q_nope, *given, **named: run(q_nope.half().float(), *given, **named)


def neighbours_seed(sample: Function) -> Function:
    def broken(logits: Any, rows: Any) -> Any:
        return sample(logits, replace(rows, seed=rows.seed + len(logits)))

    return broken


def no_ties(sample: Function) -> Function:
    """Of equal tokens the last is taken."""
    return lambda logits, rows: sample(logits + 1e-9 * torch.arange(logits.shape[1]), rows)


def with_view(change: Callable[[LatentView], LatentView]) -> Function:
    """The cache is taken for another."""

    def make(run: Function) -> Function:
        def changed(x: Any) -> Any:
            return change(x) if isinstance(x, LatentView) else x

        return lambda *given, **named: run(*map(changed, given), **named)

    return make


def neighbours_scales(view: LatentView) -> LatentView:
    """A group's codes with the scale of the group before."""
    rows = view.rows.clone()
    _, scales, _ = fp8_parts(rows, view.layout)
    scales.copy_(scales.roll(1, -1))
    return replace(view, rows=rows)


def other_scales(view: LatentView) -> LatentView:
    """Powers of two where they are none, and the other way round."""
    fp8 = view.layout.fp8
    assert fp8 is not None
    other = replace(fp8, power_of_two=not fp8.power_of_two)
    return replace(view, layout=replace(view.layout, fp8=other))


def of_weights(changed: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """What it packs, where that is stored in codes."""

    def change(weight: Weight) -> Weight:
        parts = (replace(part, stored=changed(part.stored)) for part in weight.parts)
        return replace(weight, parts=tuple(parts))

    return lambda pack: (
        lambda *given: pack(*(change(each) if isinstance(each, Weight) else each for each in given))
    )


def no_limit(pack: Function) -> Function:
    return lambda gate_up, down, linear, limit=None: pack(gate_up, down, linear)


def with_mixed(changed: Callable[[Mixed], Mixed]) -> Callable[[Function], Function]:
    return lambda mix: lambda *given, **named: changed(mix(*given, **named))


def post_of_the_count(mixed: Mixed) -> Mixed:
    return replace(mixed, post=mixed.post * (1 + 2.0**-22 * (len(mixed.post) % 7)))


def mixed_too_early(advance: Function) -> Function:
    def broken(h: Any, y: Any, mixed: Any, *given: Any, **named: Any) -> Any:
        none = torch.zeros_like(mixed.post)
        itself = torch.eye(h.shape[1]).expand_as(mixed.carry)
        merged, _ = advance(h, y, mixed, *given, **named)
        return merged, advance(h, y, replace(mixed, post=none, carry=itself), *given, **named)[1]

    return broken


def with_options(**changes: Callable[[Any], Any]) -> Callable[[Function], Function]:
    def changed(named: dict[str, Any]) -> dict[str, Any]:
        return named | {name: change(named[name]) for name, change in changes.items()}

    return lambda run: lambda *given, **named: run(*given, **changed(named))


def nibbles_swapped(stored: Any) -> Any:
    if not hasattr(stored, "packed"):
        return stored
    codes = stored.packed.contiguous().view(torch.uint8)
    swapped = codes << 4 | codes >> 4
    return replace(stored, packed=swapped.view(stored.packed.dtype))


def neighbours_scale(stored: Any) -> Any:
    return replace(stored, scales=stored.scales.roll(1, 0))


ROUNDED = {
    **dict.fromkeys(("linear", "batched_gemm", "mlp", "rms_norm", "rope", "latent_write"), "run"),
    **dict.fromkeys(("mla_decode", "mla_prefill", "sparse_mla", "index_scores", "experts"), "run"),
    **dict.fromkeys(("qkv_prepare", "gated_norm", "index_write", "compress"), "run"),
    "sink_attention": "run",
    "lightning": "prefill",
    "hyper_connections": "mix",
    "sink_prepare": "queries",
}
MISTAKES = [
    *(Mistake("digits of float16", op, OP_CHECKS[op][0].what, function, from_float16)
      for op, function in ROUNDED.items()),
    Mistake("halves swapped", "compress", "numbers", "run", faults.halves_swapped),
    Mistake("missing slots count", "compress", "numbers", "prepare", faults.first_slots_counted),
    Mistake("no bias", "compress", "numbers", "run", wrong.no_bias),
    Mistake("not rotated", "compress", "real dims", "run", wrong.not_rotated),
    Mistake("bits of the count", "compress", "bits", "run", wrong.entries_of_the_count),
    Mistake("entry a token early", "sink_attention", "numbers", "prepare", wrong.seen(1)),
    Mistake("entry a token late", "sink_attention", "numbers", "prepare", wrong.seen(-1)),
    Mistake("window one short", "sink_attention", "numbers", "prepare", wrong.window_of(-1)),
    Mistake("window one long", "sink_attention", "numbers", "prepare", wrong.window_of(1)),
    Mistake("window of 127", "sink_attention", "real dims", "prepare", wrong.window_of(-1)),
    Mistake("window of 129", "sink_attention", "real dims", "prepare", wrong.window_of(1)),
    Mistake("no sink", "sink_attention", "numbers", "run", faults.no_sink),
    Mistake("sink as value", "sink_attention", "numbers", "run", faults.sink_as_value),
    Mistake("lists not read", "sink_attention", "numbers", "run", wrong.no_lists),
    Mistake("bits of the count", "sink_attention", "bits", "run", of_the_count),
    Mistake("bits of the heads", "sink_attention", "ranks", "run", of_the_heads),
    Mistake("rounded GEMM", "linear", "numbers", "run",
            lambda run: lambda x, packed: run(x.bfloat16().float(), packed)),
    Mistake("nibbles swapped", "linear", "stored", "pack", of_weights(nibbles_swapped)),
    Mistake("scales of the row before", "linear", "stored", "pack", of_weights(neighbours_scale)),
    Mistake("bits of the count", "linear", "bits", "run", of_the_count),
    Mistake("bits of the columns", "linear", "ranks", "run", of_the_columns),
    Mistake("heads reversed", "batched_gemm", "numbers", "run",
            lambda run: lambda x, packed: run(x, packed).flip(1)),
    Mistake("scales of the row before", "batched_gemm", "stored", "pack",
            of_weights(neighbours_scale)),
    Mistake("bits of the count", "batched_gemm", "bits", "run", of_the_count),
    Mistake("bits of the heads", "batched_gemm", "ranks", "run", of_the_heads),
    Mistake("gate and up swapped", "mlp", "numbers", "pack",
            lambda pack: lambda both, *rest: pack(both.roll(len(both) // 2, 0), *rest)),
    Mistake("no limit", "mlp", "clamped", "pack", no_limit),
    Mistake("bits of the count", "mlp", "bits", "run", of_the_count),
    Mistake("bits of the width", "mlp", "ranks", "middle", of_the_columns),
    Mistake("bits of the rows of down", "mlp", "ranks", "down", of_the_columns),
    Mistake("eps left out", "rms_norm", "numbers", "run",
            lambda run: lambda x, weight, eps: rms_norm.run(x, weight, 0.0)),
    Mistake("eps left out", "latent_write", "numbers", "run",
            lambda run: lambda *given, **options: run(*given, **options | {"eps": 0.0})),
    Mistake("other scales", "latent_write", "fp8", "run", with_view(other_scales)),
    Mistake("interleaved only", "rope", "numbers", "run",
            lambda run: lambda x, cos, sin, pairing: run(x, cos, sin, "interleaved")),
    Mistake("in place", "rope", "contract", "run",
            lambda run: lambda x, *angles: x.copy_(run(x, *angles))),
    Mistake("scale of the cache row", "mla_decode", "numbers", "run",
            lambda run: lambda *given, softmax_scale: run(*given, softmax_scale=0.145)),
    Mistake("nothing rotated", "mla_decode", "real dims", "run", nothing_rotated),
    Mistake("halves swapped", "mla_decode", "real dims", "run", halves_swapped),
    Mistake("no begun tile", "mla_decode", "real dims", "prepare", no_begun_tile),
    Mistake("lse in base 2", "mla_decode", "natural lse", "run", lse_in_bits),
    Mistake("bits of the count", "mla_decode", "bits", "run", decode_of_the_count),
    Mistake("bits of the heads", "mla_decode", "ranks", "run", of_the_heads),
    Mistake("neighbours' scales", "mla_decode", "fp8", "run", with_view(neighbours_scales)),
    Mistake("bits of the count", "mla_decode", "fp8 bits", "run", decode_of_the_count),
    Mistake("neighbours' scales", "mla_prefill", "fp8", "run", with_view(neighbours_scales)),
    Mistake("neighbours' scales", "sparse_mla", "fp8", "run", with_view(neighbours_scales)),
    Mistake("one key short", "mla_prefill", "numbers", "prepare", one_key_short),
    Mistake("nothing rotated", "mla_prefill", "real dims", "run", keys_not_rotated),
    Mistake("one key short", "mla_prefill", "real dims", "prepare", one_key_short),
    Mistake("queries of float16", "mla_prefill", "near ties", "run", queries_of_float16),
    Mistake("decay off by one where a chunk begins", "lightning", "any cuts", "prefill", undecayed),
    Mistake("weak decay taken for none", "lightning", "any decay", "decode",
            lambda decode: lambda *given, slopes, scale:
                decode(*given, slopes=slopes.where(slopes > 5e-5, 0.0), scale=scale)),
    Mistake("snapshots forgotten", "lightning", "slots", "prepare_prefill",
            other_rows(lambda row: replace(row, snapshots=()))),
    Mistake("the next slot is written", "lightning", "slots", "prepare_prefill",
            other_rows(lambda row: replace(row, slot=row.slot + 1))),
    Mistake("open tile forgotten", "lightning", "fixed form", "prefill", forgotten_tail),
    Mistake("bits of the count", "lightning", "bits", "prefill", of_the_count),
    Mistake("bits of the heads", "lightning", "ranks", "prefill", of_the_heads),
    Mistake("bits of the heads", "lightning", "ranks", "decode", of_the_heads),
    Mistake("eps left out", "index_write", "numbers", "run",
            lambda run: lambda *given, **options: run(*given, **options | {"eps": 0.0})),
    Mistake("interleaved only", "index_write", "queries", "rotate",
            lambda rotate: lambda q, **options: rotate(q, **options | {"pairing": "interleaved"})),
    Mistake("keys normed as queries", "qkv_prepare", "numbers", "run",
            lambda run: lambda qkv, *, norms, **options:
                run(qkv, norms=norms and (norms[0], norms[0]), **options)),
    Mistake("one group", "gated_norm", "numbers", "run",
            lambda run: lambda *given, groups, **options: run(*given, groups=1, **options)),
    Mistake("eps left out", "sink_prepare", "numbers", "write",
            lambda write: lambda *given, **options: write(*given, **options | {"eps": 0.0})),
    Mistake("not back", "sink_prepare", "numbers", "rotate",
            lambda rotate: lambda x, *, rope, back=False: rotate(x, rope=rope)),
    Mistake("first channels", "sink_prepare", "numbers", "rotate",
            lambda rotate: lambda x, **options: rotate(x.flip(-1), **options).flip(-1)),
    Mistake("bits of the count", "sink_prepare", "bits", "queries", of_the_count),
    Mistake("carry transposed", "hyper_connections", "numbers", "merge",
            lambda merge: lambda h, y, mixed:
                merge(h, y, replace(mixed, carry=mixed.carry.mT.contiguous()))),
    Mistake("carry transposed", "hyper_connections", "numbers", "mix",
            with_mixed(lambda mixed: replace(mixed, carry=mixed.carry.mT.contiguous()))),
    Mistake("an iteration short", "hyper_connections", "numbers", "mix",
            with_options(iterations=lambda count: count - 1)),
    Mistake("an iteration more", "hyper_connections", "numbers", "mix",
            with_options(iterations=lambda count: count + 1)),
    Mistake("eps left out", "hyper_connections", "numbers", "mix",
            with_options(eps=lambda eps: 0.0)),
    Mistake("carry transposed", "hyper_connections", "numbers", "advance",
            lambda advance: lambda h, y, mixed, *given, **named:
                advance(h, y, replace(mixed, carry=mixed.carry.mT.contiguous()), *given, **named)),
    Mistake("a mix of the streams before", "hyper_connections", "numbers", "advance",
            mixed_too_early),
    Mistake("the weight left out", "hyper_connections", "numbers", "advance",
            lambda advance: lambda *given, **named:
                advance(*given[:-1], torch.ones_like(given[-1]), **named)),
    Mistake("an iteration short", "hyper_connections", "numbers", "advance",
            with_options(iterations=lambda count: count - 1)),
    Mistake("eps left out", "hyper_connections", "numbers", "advance",
            with_options(eps=lambda eps: 0.0)),
    Mistake("eps of the norm left out", "hyper_connections", "numbers", "advance",
            with_options(norm_eps=lambda eps: 0.0)),
    Mistake("bits of the count", "hyper_connections", "bits", "advance",
            lambda advance: lambda *given, **named:
                (lambda made: (made[0], post_of_the_count(made[1])))(advance(*given, **named))),
    Mistake("eps of the norm left out", "hyper_connections", "numbers", "head",
            with_options(norm_eps=lambda eps: 0.0)),
    Mistake("eps left out", "hyper_connections", "numbers", "head",
            with_options(eps=lambda eps: 0.0)),
    Mistake("bits of the count", "hyper_connections", "bits", "mix",
            with_mixed(post_of_the_count)),
    Mistake("bits of the count", "hyper_connections", "bits", "head", of_the_count),
    Mistake("rotated channels too", "row_rounding", "numbers", "key",
            with_options(rope=lambda _: 0)),
    Mistake("one scale for a row", "row_rounding", "numbers", "index", wrong.one_scale),
    Mistake("bits of the count", "row_rounding", "bits", "key", of_the_count),
    Mistake("bits of the count", "row_rounding", "bits", "index", of_the_count),
    Mistake("relu forgotten", "index_scores", "numbers", "run",
            lambda run: lambda q, weights, view, given:
                run(q, weights, view, given) - run(-q, weights, view, given)),
    Mistake("one position too few", "topk", "choices", "run",
            lambda run: lambda scores, lengths, topk:
                torch.nn.functional.pad(run(scores, lengths, topk - 1), (0, 1), value=-1)),
    Mistake("lse in base 2", "sparse_mla", "numbers", "run",
            lambda run: lambda *given, **named:
                (lambda made: (made[0], made[1] / math.log(2)))(run(*given, **named))),
    Mistake("nothing rotated", "sparse_mla", "real dims", "run", nothing_rotated),
    Mistake("halves swapped", "sparse_mla", "real dims", "run", halves_swapped),
    Mistake("bits of the heads", "sparse_mla", "ranks", "run", of_the_heads),
    Mistake("rounded logits", "route", "choices", "choose",
            lambda choose: lambda x, *given: choose(x.bfloat16().float(), *given)),
    Mistake("rounded GEMM", "linear", "numbers", "run_wide",
            lambda run: lambda x, packed: run(x.bfloat16().float(), packed)),
    Mistake("weights with the bias", "route", "choices", "run",
            lambda run: lambda logits, bias, *rest:
                run(logits if bias is None else logits + bias, None, *rest)),
    Mistake("experts counted from 0", "experts", "numbers", "run",
            lambda run: lambda x, ids, weights, packed, linear, first=0:
                run(x, ids, weights, packed, linear, 0)),
    Mistake("no limit", "experts", "clamped", "pack", no_limit),
    Mistake("no limit", "experts", "stored", "pack", no_limit),
    Mistake("nibbles swapped", "experts", "stored", "pack", of_weights(nibbles_swapped)),
    Mistake("scales of the row before", "experts", "stored", "pack", of_weights(neighbours_scale)),
    Mistake("from the last id to the first", "experts", "ranks", "combine",
            lambda combine: lambda each, weights: combine(each.flip(1), weights.flip(1))),
    Mistake("others' experts given too", "experts", "ranks", "down",
            lambda down: lambda middle, ids, packed, linear, first=0:
                down(middle, (ids - first) % 3 + first, packed, linear, first)),
    Mistake("bits of the width", "experts", "ranks", "middle", of_the_columns),
    Mistake("bits of the rows of down", "experts", "ranks", "down", of_the_columns),
    Mistake("the seed of the batch", "sampling", "definition", "sample", neighbours_seed),
    Mistake("ties the other way", "sampling", "definition", "sample", no_ties),
    Mistake("no penalty of presence", "sampling", "penalties", "sample",
            lambda sample: lambda logits, rows:
                sample(logits, replace(rows, presence=rows.presence * 0))),
    Mistake("scores of the token before", "sampling", "scores", "score",
            lambda score: lambda logits, tokens, top: score(logits, tokens.roll(1), top)),
    Mistake("the seed of the batch", "sampling", "batch", "sample", neighbours_seed),
]  # fmt: skip


FP8_MISTAKES = [
    Mistake("the last bit of inputs", "linear", "fp8 inputs", "run",
            lambda run: lambda x, packed: run(x * (1 + 2.0**-22), packed)),
    Mistake("inputs of 16 bits", "linear", "fp8 inputs", "run_wide",
            lambda run: lambda x, packed: run(x.bfloat16().float(), packed)),
    Mistake("bits of the count", "linear", "fp8 inputs, bits", "run", of_the_count),
    Mistake("digits of float16", "mlp", "fp8 inputs", "run", from_float16),
    Mistake("bits of the count", "mlp", "fp8 inputs, bits", "run", of_the_count),
    Mistake("another middle in two steps", "mlp", "fp8 inputs, bits", "middle", from_float16),
    Mistake("no limit", "mlp", "fp8 inputs", "pack", no_limit),
    Mistake("no limit", "experts", "fp8 inputs", "pack", no_limit),
    Mistake("experts counted from 0", "experts", "fp8 inputs", "run",
            lambda run: lambda x, ids, weights, packed, linear, first=0:
                run(x, ids, weights, packed, linear, 0)),
    Mistake("bits of the count", "experts", "fp8 inputs, bits", "run", of_the_count),
    Mistake("from the last id to the first", "experts", "fp8 inputs, bits", "combine",
            lambda combine: lambda each, weights: combine(each.flip(1), weights.flip(1))),
]  # fmt: skip
WITH_FP8_INPUTS = {"linear": "fp8_inputs", "mlp": "cpu", "experts": "cpu"}


@pytest.mark.parametrize("mistake", FP8_MISTAKES, ids=lambda m: f"{m.op} {m.check}: {m.what}")
def test_mistake_with_fp8_inputs_turns_its_check_red(mistake: Mistake) -> None:
    check = next(check for check in FP8_CHECKS[mistake.op] if check.what == mistake.check)
    with pytest.raises(CheckFailed):
        check.run(mistake.implementation(WITH_FP8_INPUTS[mistake.op]))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.op} {m.check}: {m.what}")
def test_mistake_turns_its_check_red(mistake: Mistake) -> None:
    check = next(check for check in OP_CHECKS[mistake.op] if check.what == mistake.check)
    with pytest.raises(CheckFailed):
        check.run(mistake.implementation())


def test_rows_that_read_too_late_are_seen() -> None:
    """Needs the rows themselves, which `prepare` of ours does not keep."""
    right = implementation("lightning", "cpu")
    wrong = SimpleNamespace(
        capabilities=right.capabilities,
        prefill=right.prefill,
        prepare_prefill=right.prepare_prefill,
        prepare=lambda rows: (right.prepare, rows[::-1]),
        decode=lambda q, k, v, view, prepared, **named: one_after_the_other(right.decode)(
            q.flip(0), k.flip(0), v.flip(0), view, prepared, **named
        ).flip(0),
    )
    check = next(check for check in OP_CHECKS["lightning"] if check.what == "slots")
    with pytest.raises(CheckFailed, match="mixed decode rows"):
        check.run(wrong)


def test_every_check_has_a_mistake() -> None:
    named = {(mistake.op, mistake.check) for mistake in MISTAKES}
    assert named == {(op, check.what) for op, checks in OP_CHECKS.items() for check in checks}
    named = {(mistake.op, mistake.check) for mistake in FP8_MISTAKES}
    assert named == {(op, check.what) for op, checks in FP8_CHECKS.items() for check in checks}
