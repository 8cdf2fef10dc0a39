"""make-tiny: deterministic, adversarial, loadable by others, and usable as a chat model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from families import RUNNABLE
from oracle import transformers_logprobs
from paths import CONFIGS
from trueline import reference
from trueline.cli import main
from trueline.cli.make_tiny import KEYS, TinyDims, _check_dims
from trueline.errors import TruelineError, UsageError
from trueline.models import read_model
from trueline.spec.feedforward import MoESpec
from trueline.spec.mixer import CompressedSpec, MLASpec
from trueline.tiny.configs import FAMILIES, change_config, family_config, own_name
from trueline.tiny.make import TinyOptions, make_checkpoint
from trueline.utils.json_types import JSON
from trueline.verify.cases import Subject
from trueline.verify.checks import ORACLE_GATE, ledger, one_spec

Tiny = Callable[..., Path]


def make(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["make-tiny", *map(str, arguments)])
    assert not caught.value.code


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_files(family: str, tmp_path: Path) -> None:
    make(family, tmp_path / "a")
    make(family, tmp_path / "b", "--seed", "0")
    make(family, tmp_path / "c", "--seed", "1")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a")["model.safetensors"] != files(tmp_path / "c")["model.safetensors"]


@pytest.mark.parametrize("family", RUNNABLE)
def test_nothing_is_at_a_neutral_value(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    mixers = [layer.mixer for layer in read_model(model).layers]
    kept = next(mixer for mixer in mixers if isinstance(mixer, MLASpec | CompressedSpec))
    widths = _widths(kept)
    assert len(set(widths)) == len(widths)
    for name, value in load_file(model / "model.safetensors").items():
        if "norm" in name:
            assert value.std() > 0.1, name
        if name.endswith(("correction_bias", "expert_bias")):
            assert value.abs().mean() > 0.05
            assert value.std() > 0.05
        # latents so small that the eps of their norms shows, beside a rotated key of full size
        if name.endswith(("q_a_proj.weight", ".wq_a.weight", ".attn.wkv.weight")):
            assert value.std() * value.shape[1] ** 0.5 < 0.2, name
        if name.endswith("kv_a_proj_with_mqa.weight"):
            assert isinstance(kept, MLASpec)
            latent, key = value.split([kept.kv_lora_rank, kept.qk_rope_head_dim])
            assert latent.std() * value.shape[1] ** 0.5 < 0.2, name
            assert key.std() * value.shape[1] ** 0.5 > 0.5, name


def _widths(mixer: MLASpec | CompressedSpec) -> list[int]:
    if isinstance(mixer, CompressedSpec):
        ranks = [mixer.q_lora_rank, mixer.o_lora_rank, mixer.o_groups.total, mixer.window]
        return [mixer.head_dim, mixer.rope.dim, mixer.heads.total, *ranks]
    widths = [mixer.kv_lora_rank, mixer.qk_nope_head_dim, mixer.qk_rope_head_dim]
    return [*widths, mixer.v_head_dim, mixer.heads.total, mixer.q_lora_rank or 0]


@pytest.mark.parametrize("family", RUNNABLE)
def test_routing_spreads_and_logits_vary(family: str, tiny: Tiny) -> None:
    model = tiny(family)
    spec = read_model(model)
    tokens = torch.randint(311, (128,), generator=torch.Generator().manual_seed(0))
    trace: dict[int, torch.Tensor] = {}
    logits = reference.load(model).logits(tokens, trace=trace)
    assert 3 < logits.abs().max() < 30
    moe = spec.layers[-1].feed_forward
    assert isinstance(moe, MoESpec)
    for ids in trace.values():
        assert len(ids.unique()) == moe.experts.total


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2",
                                    "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"])  # fmt: skip
def test_transformers_loads_it_and_agrees(family: str, tiny: Tiny, tmp_path: Path) -> None:
    """In published form, with no warning to hide behind: every logprob, every position."""
    model = tiny(family)
    tokens = torch.randint(311, (40,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(40)
    ours = reference.load(model).logprobs(tokens, positions)
    for dtype, gate in ((torch.float64, ORACLE_GATE), (torch.float32, 3e-5)):
        theirs = transformers_logprobs(model, tokens, positions, dtype, tmp_path)
        assert (ours - theirs).abs().max() <= gate


def test_options_reach_the_config(tmp_path: Path) -> None:
    make(
        *("deepseek_v3", tmp_path / "m", "--layers", "3", "--dense-layers", "2", "--hidden", "64"),
        *("--heads", "8", "--q-lora", "0", "--kv-lora", "21", "--nope", "9", "--rope", "6"),
        *("--value", "7", "--width", "50", "--experts", "10", "--top-k", "2", "--groups", "5"),
        *("--top-groups", "3", "--expert-width", "11", "--shared-experts", "3", "--vocab", "300"),
        *("--max-position", "999", "--no-yarn", "--dtype", "bfloat16", "--shard-mb", "1"),
    )
    spec = read_model(tmp_path / "m")
    mixer, moe = spec.layers[0].mixer, spec.layers[2].feed_forward
    assert isinstance(mixer, MLASpec)
    assert isinstance(moe, MoESpec)
    assert moe.shared_width is not None
    assert (spec.num_layers, spec.hidden_size, spec.vocab.total) == (3, 64, 300)
    assert (mixer.heads.total, mixer.q_lora_rank, mixer.kv_lora_rank) == (8, None, 21)
    assert (mixer.qk_nope_head_dim, mixer.qk_rope_head_dim, mixer.v_head_dim) == (9, 6, 7)
    assert (moe.experts.total, moe.router.top_k, moe.router.num_groups) == (10, 2, 5)
    assert (moe.router.top_groups, moe.expert_width.total, moe.shared_width.total) == (3, 11, 33)
    assert (spec.max_position, mixer.rope.yarn, spec.dtype) == (999, None, "bfloat16")


def test_options_of_an_indexer(tmp_path: Path) -> None:
    options = ("--index-heads", "16", "--index-head", "40", "--index-topk", "5")
    make("glm_moe_dsa", tmp_path / "m", *options)
    mixer = read_model(tmp_path / "m").layers[0].mixer
    assert isinstance(mixer, MLASpec)
    assert mixer.indexer is not None
    indexer = mixer.indexer
    assert (indexer.heads, indexer.head_dim, indexer.topk) == (16, 40, 5)


@pytest.mark.parametrize(
    ("family", "options", "dtypes"),
    [
        ("deepseek_v3", ("block-fp8", "--ue8m0", "--fp8-block", "16"), {"float8_e4m3fn"}),
        ("kimi_k2", ("int4", "--dtype", "bfloat16"), {"int32", "int64", "bfloat16"}),
        ("kimi_k25", ("int4", "--group-size", "128", "--dtype", "float16"), {"int32", "float16"}),
        ("deepseek_v3", ("fp4",), {"int8", "float8_e8m0fnu", "float8_e4m3fn"}),
    ],
)
def test_formats_from_the_command_line(
    family: str, options: tuple[str, ...], dtypes: set[str], tmp_path: Path
) -> None:
    make(family, tmp_path / "m", "--format", *options)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {f"torch.{name}" for name in dtypes} <= {str(value.dtype) for value in stored.values()}
    nothing = torch.empty(0, dtype=torch.long)
    ledger(Subject(options[0], tmp_path / "m", nothing, nothing))


def test_yarn_can_be_put_in(tmp_path: Path) -> None:
    make("glm4_moe_lite", tmp_path / "m", "--yarn")
    assert read_model(tmp_path / "m").layers[0].mixer.rope.yarn is not None


@pytest.mark.parametrize(
    "config", ["mid", "v2lite", "mid-hybrid", "ling25s", "mid-sparse", "mid-v4", "v32s", "k25s"]
)
def test_from_a_config_file(config: str, tmp_path: Path) -> None:
    """Benchmark configs, made narrow: the file's other keys stay as they are."""
    width = "32" if config == "k25s" else "16"  # int4 has groups of 32
    narrow = ("--layers", "2", "--hidden", "64", "--width", "32", "--expert-width", width)
    if config in ("mid-hybrid", "ling25s"):
        narrow = (*narrow, "--layer-group", "2", "--linear-head", "24", "--norm-groups", "3")
    if config in ("mid-sparse", "v32s"):
        narrow = (*narrow, "--q-lora", "24", "--index-head", "70", "--index-heads", "16")
    if config == "mid-v4":
        narrow = ("--layers", "4", "--hidden", "64", "--expert-width", "16", "--output-groups", "2")
    file = CONFIGS / config / "config.json"
    make("config", tmp_path / "m", "--config", file, *narrow, "--vocab", "32000", "--heads", "2")
    nothing = torch.empty(0, dtype=torch.long)
    subject = Subject(config, tmp_path / "m", nothing, nothing)
    one_spec(subject)
    ledger(subject)
    original = json.loads(file.read_text())
    made = json.loads((tmp_path / "m" / "config.json").read_text())
    key = "num_experts" if "num_experts" in original else "n_routed_experts"
    assert made[key] == original[key]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["deepseek_v5"], "accepted: deepseek_v2"),
        (["deepseek_v3", "--config", "x.json"], "write 'config' as the family"),
        (["config", "--config", "x.json"], "not readable"),
        (["deepseek_v3", "--experts", "7"], "n_group"),
        (["deepseek_v3", "--vocab", "200"], "vocab_size = 200"),
        (["deepseek_v3", "--format", "block-fp8", "--fused-experts"], "one by one"),
        (["deepseek_v3", "--ue8m0"], "--ue8m0: accepted with --format block-fp8"),
        (["deepseek_v3", "--format", "fp4", "--ue8m0"], "accepted with --format block-fp8"),
        (
            ["deepseek_v3", "--fp8-block", "64"],
            "accepted with --format block-fp8 or base-fp8 or fp4",
        ),
        (["deepseek_v3", "--format", "fp4", "--group-size", "64"], "with --format int4"),
        (["kimi_k2", "--format", "int4", "--hidden", "80"], "80 columns: accepted: whole groups"),
        (["kimi_k2", "--format", "int4", "--group-size", "20"], "a multiple of 8"),
        (["glm_moe_dsa", "--linear-head", "8"], "--linear-head: glm_moe_dsa has no such dim"),
    ],
)
def test_refused(
    arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, *flags = arguments
    with pytest.raises(SystemExit) as caught:
        main(["make-tiny", family, str(tmp_path / "m"), *flags])
    assert caught.value.code == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "m").exists()  # nothing half made stays behind


@pytest.mark.parametrize("family", FAMILIES)
def test_no_dim_is_ignored(family: str, tmp_path: Path) -> None:
    """It changes what is read of the config, or is refused; but for groups, which a greedy router
    does not look at whatever its config says."""
    text = family_config(family).get("text_config", family_config(family))
    before = read_model(_with_config(family_config(family), tmp_path / "before"))
    for name, key in KEYS.items():
        given = 2 * (text.get(own_name(text, key)) or 4)
        asked, config = TinyDims(**{name: given}), family_config(family)
        try:
            _check_dims(asked, text)
            change_config(config, asked.config_keys())
            after = read_model(_with_config(config, tmp_path / name))
        except TruelineError:  # no such dim, or one that does not go with the others
            continue
        greedy = text.get("topk_method") == "greedy" and "groups" in name
        assert (after != before) != greedy, name


@pytest.mark.parametrize("family", FAMILIES)
def test_dims_that_a_family_has_are_taken(family: str) -> None:
    """Under its own names of them."""
    text = family_config(family).get("text_config", family_config(family))
    names = {"experts", "shared_experts", "heads", "layers", "q_lora", "vocab"}
    names |= {"linear_head"} if family in ("bailing_moe_v2_5", "deepseek_v4") else set()
    names |= {"index_head"} if "index_topk" in text else set()
    _check_dims(TinyDims(**dict.fromkeys(names, 8)), text)


def _with_config(config: JSON, directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_unsupported_config_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(family_config("deepseek_v3") | {"model_type": "glm5_next"}))
    with pytest.raises(SystemExit):
        main(["make-tiny", "config", str(tmp_path / "m"), "--config", str(file)])
    assert "'glm5_next'" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        make_checkpoint(tmp_path, family_config("deepseek_v3"), TinyOptions())
    assert (tmp_path / "precious").read_text() == "x"


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_takes_any_text(family: str, tiny: Tiny) -> None:
    tokenizer = Tokenizer.from_file(str(tiny(family) / "tokenizer.json"))
    for text in ("plain", "naïve — 线性 🙂\n\t\x00", " two  spaces "):
        ids = tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        assert max(ids) < 311
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template(tiny: Tiny) -> None:
    model = tiny("deepseek_v3")
    config = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    template = jinja2.Environment().from_string(config["chat_template"])
    text = template.render(
        messages=[{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
    )
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[0] == 256
    assert ids[-2] == read_model(model).eos_token_ids[0]
    assert len(ids) == 6


def test_special_tokens_keep_the_ids_of_the_config(tmp_path: Path) -> None:
    config = family_config("deepseek_v3") | {"vocab_size": 999, "bos_token_id": 0}
    config["eos_token_id"] = [900, 901]
    make_checkpoint(tmp_path / "m", config, TinyOptions())
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.token_to_id("<|begin|>") == 0
    assert tokenizer.token_to_id("<|end|>") == 900
    assert len({tokenizer.encode(chr(i)).ids[0] for i in range(128)} | {0, 900}) == 130


def test_one_id_for_both_ends_is_that_of_the_end(tmp_path: Path) -> None:
    """Or the model's text would never end."""
    config = family_config("deepseek_v3") | {"bos_token_id": 5, "eos_token_id": 5}
    make_checkpoint(tmp_path / "m", config, TinyOptions())
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert tokenizer.token_to_id("<|end|>") == 5
    assert tokenizer.token_to_id("<|begin|>") not in (None, 5)
