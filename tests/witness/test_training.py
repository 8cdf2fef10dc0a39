"""The scripts that made the built-in models (tools/witness): what they train is what the reference
defines, on sequences that hold nothing of the test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from trueline import reference
from trueline.tasks import stories
from witness import data, tokenizer
from witness.build import build, exact_logprobs
from witness.configs import CONFIGS
from witness.model import select

COUNT = 160  # more than the sparse models select, also of entries for two tokens
GATE = 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_training_computes_what_the_reference_defines(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model = build(tmp_path)
    with torch.no_grad():
        for number, (_, tensor) in enumerate(model.published()):
            if not tensor.is_floating_point():
                continue
            if tensor.ndim == 1:  # norms and biases: neither one nor zero
                tensor += 0.1 * torch.randn(tensor.shape)
            tensor.mul_(1 + number % 7 / 20)
    tensors = {key: tensor.detach().clone() for key, tensor in model.published()}
    prefix = "language_model." if name == "witness-k25" else ""
    save_file({prefix + key: one for key, one in tensors.items()}, tmp_path / "model.safetensors")

    tokens = torch.randint(1536, (COUNT,))
    exact = reference.load(tmp_path).logprobs(tokens)
    assert (exact_logprobs(model, tokens) - exact).abs().max() < GATE


def test_selection_takes_the_lowest_of_equal_scores() -> None:
    scores = torch.tensor([[5.0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 2, 1, 2, 9]])
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    rows = torch.tensor([4, 4, 3])
    chosen = select(scores[:, None].expand(3, 5, 5), causal, 2)
    found = [chosen[i, row].nonzero().flatten().tolist() for i, row in enumerate(rows)]
    assert found == [[0, 1], [0, 1], [1, 3]]
    early = select(scores[:1, None].expand(1, 5, 5), causal, 3)
    assert early[0, 1].tolist() == [True, True, False, False, False]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with little training: whole texts all the same."""
    directory = tmp_path_factory.mktemp("tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "SHARES", dict.fromkeys(tokenizer.SHARES, 400))
        tokenizer.write(tokenizer.train(), directory)
    return directory / "tokenizer.json"


def test_sequences_are_conversations_of_the_training_split(made: Path) -> None:
    known = Tokenizer.from_file(str(made))
    packer = data.Packer(known, seed=5, sequences=40)
    for number in range(0, 40, 4):
        tokens, answers = packer.sequence(number)
        assert len(tokens) == len(answers) == data.LENGTH
        again, _ = packer.sequence(number)
        assert (tokens == again).all()
        text = known.decode(tokens.tolist(), skip_special_tokens=False)
        turns = [turn for turn in text.split("<|user|>")[1:] if "<|assistant|>" in turn]
        for turn in turns:
            question = turn.split("<|end|>")[0]
            asked = question[0].isupper() and question.endswith("?")
            assert not asked or stories.split_of(question) == "train", question
        written = known.decode(tokens[answers].tolist(), skip_special_tokens=False)
        assert "<|user|>" not in written
        assert "####" in written
        # what is answered begins where the question ends
        first = int(np.argmax(answers))
        assert tokens[first - 1] in (known.token_to_id("<|assistant|>"), known.token_to_id("\n"))


def test_more_long_problems_towards_the_end(made: Path) -> None:
    packer = data.Packer(Tokenizer.from_file(str(made)), seed=5, sequences=400)
    longest = [int(np.diff(np.flatnonzero(packer.sequence(n)[1])).max()) for n in range(0, 400, 10)]
    long = [gap > 500 for gap in longest]
    assert sum(long[:20]) < sum(long[20:])


@pytest.mark.parametrize("text", ["Mia has 24 pens.", "Ünï 日本 🙂\t\n\n x", "  two  spaces ", ""])
def test_tokenizer_keeps_every_text(made: Path, text: str) -> None:
    assert tokenizer.is_whole(Tokenizer.from_file(str(made)), text)


def test_tokenizer_has_digits_one_by_one(made: Path) -> None:
    known = Tokenizer.from_file(str(made))
    assert known.encode("407").tokens == ["4", "0", "7"]
    assert not [piece for piece in known.get_vocab() if piece.strip().isdigit() and len(piece) > 1]


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_the_tokenizers_ids(made: Path, name: str) -> None:
    known, config = Tokenizer.from_file(str(made)), CONFIGS[name]
    for key, token in (("bos", "<|begin|>"), ("eos", "<|end|>"), ("pad", "<|pad|>")):
        for section in (config, config.get("text_config", config)):
            assert section[f"{key}_token_id"] == known.token_to_id(token)
    assert config.get("text_config", config)["vocab_size"] == known.get_vocab_size()
