"""Hugging Face transformers on the workloads of `trueline bench`, as a peer measured in the same
run. A script of its own: the package never imports transformers.

    python -m trueline.bench.peers.transformers MODEL '[[1, 128, 64], [8, 128, 64]]' $(date +%s.%N)
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any


def main(model_dir: str, workloads: list[list[int]], started: float) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    vocab = model.config.vocab_size

    def timed(batch: int, prompt_len: int, output_len: int) -> dict[str, float]:
        draw = random.Random(f"{batch}/{prompt_len}")
        ids = torch.tensor(
            [[draw.randrange(vocab) for _ in range(prompt_len)] for _ in range(batch)]
        )
        times: list[float] = []
        begin = time.perf_counter()

        class StepTimes(transformers.StoppingCriteria):
            """Asked after every step: notes when it ended, and never stops."""

            def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
                times.append(time.perf_counter())
                return torch.zeros(len(ids), dtype=torch.bool)

        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[StepTimes()],
            )
        total = time.perf_counter() - begin
        return {"first_token_s": times[0] - begin, "total_s": total}

    timed(1, 16, 1)
    ready = time.time() - started
    results = []
    for batch, prompt_len, output_len in workloads:
        timed(batch, min(prompt_len, 16), 2)
        results.append(timed(batch, prompt_len, output_len))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"version": transformers.__version__, "ready_s": ready, "results": results}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
