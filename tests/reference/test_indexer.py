"""What the layers of DeepSeek-V3.2 and GLM-5 see: scores, selections, ties, shared layers; against
transformers, a sum written out, and DeepSeek-V3 where every key is selected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

import hf
from oracle import transformers_logprobs
from trueline import reference
from trueline.errors import UsageError
from trueline.reference import indexer
from trueline.tiny.configs import family_config
from trueline.verify.cases import CASES, make_subject
from trueline.verify.checks import CHECKS, ORACLE_GATE
from trueline.verify.failed import CheckFailed

Tiny = Callable[..., Path]
FAMILIES = ("deepseek_v32", "glm_moe_dsa")
SPARSE_CASES = [name for name, case in CASES.items() if case.family in FAMILIES]


@pytest.mark.parametrize(
    "name", [name for name in SPARSE_CASES if CASES[name].storage is None and not CASES[name].spare]
)
def test_scores_and_selections_equal_the_sum(name: str, tmp_path: Path) -> None:
    CHECKS["index = sum"](make_subject(name, tmp_path / name))


# transformers reads no pairing from the file; ties fall as they like there; fp8 and MTP it loads
# another way
WITHOUT_ORACLE = ("v32-interleaved", "glm5-half-split", "v32-ties", "v32-fp8", "glm5-fp8")


@pytest.mark.parametrize("name", [name for name in SPARSE_CASES if name not in WITHOUT_ORACLE])
def test_transformers_agrees_at_every_position(name: str, tmp_path: Path) -> None:
    subject = make_subject(name, tmp_path / name)
    theirs = transformers_logprobs(
        subject.model, subject.tokens, subject.positions, torch.float64, tmp_path
    )
    ours = reference.load(subject.model).logprobs(subject.tokens, subject.positions)
    assert (ours - theirs).abs().max() <= ORACLE_GATE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_key_turns_the_other_way(
    family: str, checkpoints: hf.Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers with the other rotation in its indexer is our model with the other value."""
    checkpoint = checkpoints(hf.Case(family, yarn=False))
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint.path, copy)
    hf.edit_config(copy, indexer_rope_interleave=family == "deepseek_v32")
    positions = torch.arange(hf.T) * 7
    before = reference.load(checkpoint.path).logprobs(hf.TOKENS, positions)
    ours = reference.load(copy).logprobs(hf.TOKENS, positions)
    assert (ours - before).abs().max() > 0.1
    if family == "deepseek_v32":  # whose indexer alone calls this
        monkeypatch.setattr(v32, "apply_rotary_pos_emb", v32.apply_rotary_pos_emb_interleave)
    else:
        interleaved, half_split = glm.apply_rotary_pos_emb_interleave, v32.apply_rotary_pos_emb

        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            # the indexer has its heads in the third place
            return (half_split if unsqueeze_dim == 2 else interleaved)(
                q, k, cos, sin, unsqueeze_dim=unsqueeze_dim
            )

        monkeypatch.setattr(glm, "apply_rotary_pos_emb_interleave", rotate)
    theirs = checkpoint.logprobs(hf.TOKENS, positions, torch.float64)
    assert (ours - theirs).abs().max() <= hf.FLOAT64_GATE


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_selections_are_recorded_and_forced(family: str, form: str, tiny: Tiny) -> None:
    model = reference.load(tiny(family))
    tokens = torch.randint(311, (48,), generator=torch.Generator().manual_seed(2))
    made: dict[int, Tensor] = {}
    plain = model.logits(tokens, form=form, selected=made)
    assert list(made) == list(range(model.config.num_hidden_layers))
    assert {tuple(rows.shape) for rows in made.values()} == {(48, 24)}
    for rows in made.values():
        for t, row in enumerate(rows.tolist()):
            count = min(t + 1, 24)
            assert sorted(row[:count]) == sorted(set(row[:count]))
            assert all(0 <= place <= t for place in row[:count])
            assert row[count:] == [indexer.NOTHING] * (24 - count)
    # forced as recorded, whatever the order: the same
    shuffled = {layer: rows.flip(1) for layer, rows in made.items()}
    again: dict[int, Tensor] = {}
    replayed = model.logits(tokens, form=form, forced=shuffled, selected=again)
    assert (replayed - plain).abs().max() <= 1e-12
    assert all(torch.equal(again[layer], shuffled[layer]) for layer in made)
    # forced otherwise: the last 24 keys
    window = torch.arange(48)[:, None] - torch.arange(24)
    near = model.logits(tokens, form=form, forced={0: window.clamp_min(-1)})
    assert (near - plain)[:24].abs().max() <= 1e-12
    assert (near - plain)[24:].abs().max() > 0.1


def test_a_shared_layer_sees_what_the_last_full_one_selected(tiny: Tiny) -> None:
    model = reference.load(tiny("glm_moe_dsa"))
    tokens = torch.randint(311, (60,), generator=torch.Generator().manual_seed(2))
    made: dict[int, Tensor] = {}
    model.logits(tokens, selected=made)
    same = [[bool(torch.equal(made[a], made[b])) for b in range(6)] for a in range(6)]
    owner = [0, 1, 1, 1, 4, 4]
    assert same == [[a == b for b in owner] for a in owner]
    # what is forced on an owner, those that share it see too
    window = (torch.arange(60)[:, None] - torch.arange(24)).clamp_min(-1)
    model.logits(tokens, forced={1: window}, selected=made)
    assert all(torch.equal(made[layer], window) for layer in (1, 2, 3))
    assert not torch.equal(made[4], window)


def test_a_wrong_selection_is_refused(tiny: Tiny) -> None:
    model = reference.load(tiny("deepseek_v32"))
    for bad in (torch.tensor([[0], [2], [0]]), torch.tensor([[0], [-2], [0]]), torch.zeros(2, 1)):
        with pytest.raises(UsageError, match="places from 0 to its own"):
            model.logits([1, 2, 3], forced={0: bad})


def test_few_heads_tie_and_the_lowest_place_wins(tmp_path: Path) -> None:
    """With two heads relu leaves many scores at exactly 0; transformers promises no order there."""
    subject = make_subject("v32-ties", tmp_path / "ties")
    model = reference.load(subject.model)
    seen: list[Tensor] = []
    largest = indexer.largest

    def watched(values: Tensor, topk: int) -> Tensor:
        seen.append(values)
        return largest(values, topk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "largest", watched)
        model.logits(subject.tokens, subject.positions)
    zeros = [(row[: t + 1] == 0).sum().item() for values in seen for t, row in enumerate(values)]
    assert max(zeros) > 8
    rows = torch.tensor([[3.0, 1.0, 3.0, 0.0, 1.0, 3.0, 1.0]]).repeat(7, 1)
    assert largest(rows, 4)[-1].tolist() == [0, 2, 5, 1]
    assert largest(rows, 4)[2].tolist() == [0, 2, 1, -1]


def test_as_many_keys_as_tokens_is_dense(tiny: Tiny, tmp_path: Path) -> None:
    """The same weights without an indexer, as DeepSeek-V3, give the same numbers."""
    model = tiny("deepseek_v32", keys={"index_topk": 40})
    dense = tmp_path / "dense"
    shutil.copytree(model, dense)
    raw = json.loads((dense / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if not key.startswith("index_")}
    raw |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (dense / "config.json").write_text(json.dumps(raw))
    tensors = load_file(dense / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if ".indexer." not in name},
        dense / "model.safetensors",
    )
    tokens = torch.randint(311, (50,), generator=torch.Generator().manual_seed(2))
    off = (reference.load(model).logits(tokens) - reference.load(dense).logits(tokens)).abs()
    assert off[:40].max() <= 1e-12
    assert off[40:].amax(1).min() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_nothing_before_it(family: str, tiny: Tiny) -> None:
    model = reference.load(tiny(family))
    tokens = torch.randint(311, (48,), generator=torch.Generator().manual_seed(2))
    before = model.logprobs(tokens)
    for place in (1, 30, 47):
        changed = tokens.clone()
        changed[place] = (changed[place] + 1) % 311
        after = model.logprobs(changed)
        assert (after - before)[:place].abs().max() <= 1e-12


def test_scores_carry_no_gradient(tiny: Tiny) -> None:
    model = reference.load(tiny("deepseek_v32"))
    for value in model.params.values():
        value.requires_grad_()
    model.logprobs(torch.arange(40))[-1, 5].backward()
    dark = {name for name, value in model.params.items() if value.grad is None}
    assert {name for name in dark if ".experts." not in name and "correction_bias" not in name} == {
        name for name in model.params if ".indexer." in name
    }


def test_bfloat16_scores_are_float32(tiny: Tiny) -> None:
    model = reference.load(tiny("deepseek_v32"), torch.bfloat16)
    x = torch.randn(9, 78, generator=torch.Generator().manual_seed(0)).bfloat16()
    latent = torch.randn(9, 29, generator=torch.Generator().manual_seed(1)).bfloat16()
    table, _ = model.ropes(torch.arange(9))
    values = indexer.scores(model.config, model.params, 0, x, latent, table)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    norm = torch.nn.LayerNorm(32, eps=1e-6).bfloat16()
    norm.weight.data, norm.bias.data = x[0, :32], x[1, :32]
    assert torch.equal(indexer.layer_norm(x[:, :32], norm.weight, norm.bias), norm(x[:, :32]))


BREAKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "scores are": ("scores", lambda original: lambda *a: original(*a) * (1 + 1e-9)),
    "selected, not": ("largest", lambda original: lambda v, k: original(v, k).flip(1)),
    "sees other keys": ("kept", lambda _: lambda chosen, count: torch.eye(count).bool()),
}


@pytest.mark.parametrize("message", BREAKS)
def test_each_part_of_the_check_can_fail(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, breaking = BREAKS[message]
    monkeypatch.setattr(indexer, name, breaking(getattr(indexer, name)))
    with pytest.raises(CheckFailed, match=message):
        CHECKS["index = sum"](make_subject("glm5", tmp_path / "glm5"))


def test_tiny_configs_are_what_they_should_be() -> None:
    """Dims that would hide a mistake if they were equal are not."""
    for family in FAMILIES:
        config = family_config(family)
        assert config["index_n_heads"] >= 16
        assert config["index_topk"] < 48
        assert config["index_head_dim"] > 2 * config["qk_rope_head_dim"]
        widths = {config[key] for key in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")}
        assert len(widths) == 3
    glm = family_config("glm_moe_dsa")
    assert (glm["qk_nope_head_dim"] + glm["v_head_dim"]) % 32
