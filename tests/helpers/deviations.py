"""Print how far the reference is from transformers, family by family: the table of
docs/reference.md. Run as `python tests/helpers/deviations.py`."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from test_reference_oracle import PLACES

import hf
from trueline import reference


def main() -> None:
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    with tempfile.TemporaryDirectory() as scratch:
        for case in hf.CASES:
            checkpoint = hf.make(case, Path(scratch) / str(case))
            exact = reference.load(checkpoint.path)
            for positions in PLACES.values():
                ours = exact.logprobs(hf.TOKENS, positions)
                float64, float32 = (
                    checkpoint.logprobs(hf.TOKENS, positions, dtype).double()
                    for dtype in (torch.float64, torch.float32)
                )
                expanded, absorbed = (
                    exact.logits(hf.TOKENS, positions, form=form)
                    for form in ("expanded", "absorbed")
                )
                forms = (absorbed - expanded).abs().max() / expanded.abs().max()
                found = [
                    (ours - float64).abs().max(),
                    (ours - float32).abs().max(),
                    (float32 - float64).abs().max(),
                    forms,
                ]
                kept = worst[case.family]
                worst[case.family] = [max(a, float(b)) for a, b in zip(kept, found, strict=True)]
    print("family: to float64, to float32, float32 to float64, absorbed to expanded")
    for family, figures in worst.items():
        print(f"{family}: {', '.join(f'{figure:.1e}' for figure in figures)}")


if __name__ == "__main__":
    main()
