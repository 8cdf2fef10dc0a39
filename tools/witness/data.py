"""Training sequences: conversations of the training split, packed end to end.

A sequence is a function of (seed, its number), so that any number of processes make the same ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from tokenizers import Tokenizer

from trueline.tasks import stories
from trueline.tasks.draw import Draw
from trueline.utils.builtin import TRAINED_LEN

LENGTH = TRAINED_LEN
SHORT = {
    "1 operation": 6, "2 operations": 17, "3 operations": 17, "4 operations": 17,
    "5 operations": 17, "middle": 8, "recall": 10, "other": 8,
}  # fmt: skip
"""How often, of a hundred."""
LONG_SHARE = (0.25, 0.7)
"""Of sequences with a long problem: at the beginning of the training, and at its end."""
BEFORE_LONG = ("other", "1 operation", "2 operations")
"""Short ones, so that the long problem and its answer fit behind them."""
PART = 500
"""Sequences that a process makes at a time."""
TOKENS, ANSWERS, MADE = "tokens.npy", "answers.npy", "made.txt"
PATIENCE = 120
SYSTEM = ("You are a helpful assistant.", "You solve arithmetic stories.", "Answer the question.",
          "Be brief.", "You are a careful teacher.")  # fmt: skip


class Packer:
    def __init__(self, tokenizer: Tokenizer, seed: int, sequences: int) -> None:
        self._tokenizer, self._seed, self._sequences = tokenizer, seed, sequences
        self._id = {
            name: tokenizer.token_to_id(f"<|{name}|>")
            for name in ("begin", "end", "system", "user", "assistant")
        }
        self._newline = tokenizer.token_to_id("\n")
        self._mix = [name for name, share in SHORT.items() for _ in range(share)]

    def sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [LENGTH], and which of them are answers."""
        draw = Draw(f"{self._seed} {number}")
        tokens: list[int] = []
        answers: list[bool] = []
        low, high = LONG_SHARE
        waiting = draw.chance(low + (high - low) * number / self._sequences)
        room = draw.between(0, 60)
        while len(tokens) < LENGTH:
            if waiting and len(tokens) >= room:
                category, waiting = "long", False
            else:
                category = draw.one(BEFORE_LONG if waiting else self._mix)
            problem = self._problem(draw, category)
            self._append(draw, tokens, answers, problem)
        return np.array(tokens[:LENGTH], np.uint16), np.array(answers[:LENGTH], bool)

    def _problem(self, draw: Draw, category: str) -> stories.Problem:
        while True:
            problem = stories.make(draw, category)
            if stories.split_of(problem.question) == "train":
                return problem

    def _append(
        self, draw: Draw, tokens: list[int], answers: list[bool], problem: stories.Problem
    ) -> None:
        ids, encode = self._id, lambda text: self._tokenizer.encode(text).ids
        question = problem.question
        if draw.chance(0.04):
            question = question.lower()
        if draw.chance(0.02):
            question = question.rstrip("?.")
        if draw.chance(0.15):  # plain text
            prompt = [ids["begin"], *encode(question), self._newline]
        else:
            goes_on = bool(tokens) and draw.chance(0.3)
            prompt = [] if goes_on else [ids["begin"]]
            if not goes_on and draw.chance(0.08):
                prompt += [ids["system"], *encode(draw.one(SYSTEM)), ids["end"]]
            prompt += [ids["user"], *encode(question), ids["end"], ids["assistant"]]
        answer = [*encode(problem.solution), ids["end"]]
        tokens += prompt + answer
        answers += [False] * len(prompt) + [True] * len(answer)


def _part(file: str, seed: int, sequences: int, part: range) -> tuple[np.ndarray, np.ndarray]:
    packer = Packer(Tokenizer.from_file(file), seed, sequences)
    made = [packer.sequence(number) for number in part]
    return np.stack([tokens for tokens, _ in made]), np.stack([answers for _, answers in made])


def make(work: Path, seed: int, count: int) -> float:
    """Write all of them, in order: tokens [count, LENGTH] and which are answers, whose share it
    returns. MADE says how many are there, so that a training can begin with the first ones."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokens = open_memmap(work / TOKENS, "w+", np.uint16, (count, LENGTH))
    answers = open_memmap(work / ANSWERS, "w+", np.bool_, (count, LENGTH))
    parts = [range(start, min(start + PART, count)) for start in range(0, count, PART)]
    many = [str(work / "tokenizer.json")] * len(parts), [seed] * len(parts), [count] * len(parts)
    with ProcessPoolExecutor() as pool:
        for part, made in zip(parts, pool.map(_part, *many, parts), strict=True):
            tokens[part.start : part.stop], answers[part.start : part.stop] = made
            (work / MADE).write_text(str(part.stop))
    return float(answers.mean())


class Sequences:
    """What `make` has written, or is writing: whoever asks for more waits."""

    def __init__(self, work: Path) -> None:
        self._made, self._ready = work / MADE, 0
        self._wait(1)
        self._tokens = np.load(work / TOKENS, mmap_mode="r")
        self._answers = np.load(work / ANSWERS, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and which are answers; after the last sequences the first ones come again."""
        rows = [row % len(self) for row in range(number * size, (number + 1) * size)]
        self._wait(max(rows) + 1)
        return self._tokens[rows], self._answers[rows]

    def _wait(self, count: int) -> None:
        since = time.monotonic()
        while self._ready < count:
            ready = int(self._made.read_text() or 0) if self._made.exists() else 0
            if ready > self._ready:
                self._ready, since = ready, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise TimeoutError(f"{self._made}: {ready} sequences, and no more for {PATIENCE} s")
            else:
                time.sleep(0.02)


def held_out(
    tokenizer: Tokenizer, category: str, split: stories.Split, count: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and solution of single questions, as the chat template has them."""
    end, begin = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|begin|>")
    user, assistant = tokenizer.token_to_id("<|user|>"), tokenizer.token_to_id("<|assistant|>")
    for problem in stories.problems(category, split, count):
        prompt = [begin, user, *tokenizer.encode(problem.question).ids, end, assistant]
        yield prompt, [*tokenizer.encode(problem.solution).ids, end]
