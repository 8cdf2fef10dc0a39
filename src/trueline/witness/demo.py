"""What the project is, in a minute: a question, its worked answer as it streams, and 50 problems
without and with one story's bug."""

from __future__ import annotations

import time

from trueline.llm import LLMEngine
from trueline.spec.mixer import MLASpec
from trueline.utils.builtin import BUILTIN_MODELS, DEFAULT_MODEL, SAMPLE_PROBLEM
from trueline.utils.progress import human_bytes
from trueline.witness.measure import PARAMS, Answers, ask_together
from trueline.witness.run import ProblemSets, engine_of
from trueline.witness.stories import STORY_FAULTS, switched_on

ITEMS = 50


def show_demo(device: str) -> int:
    model = BUILTIN_MODELS[DEFAULT_MODEL]
    fault = next(one for one in STORY_FAULTS if one.model == model.name and one.historical)
    sets = ProblemSets.draw(ITEMS, 0)
    with engine_of(model, {"device": device}) as engine:
        size = human_bytes(engine.plan.weight_bytes)
        print(f"{model.name}: {model.stands_for}, {size}, trained on arithmetic stories")
        print("A problem that it has not seen, and its answer:\n")
        print(f"> {SAMPLE_PROBLEM}\n")
        _stream(engine, SAMPLE_PROBLEM)
        right = _ask(engine, sets, f"\n{ITEMS} more problems")
        right_scale = _softmax_scale(engine)
    with switched_on(fault), engine_of(model, {"device": device}) as engine:
        broken = _ask(engine, sets, "the same with a bug switched on")
        wrong_scale = _softmax_scale(engine)
    print(
        f"\nThe bug is one that public engines had: attention scores were multiplied by "
        f"{wrong_scale:.3f}\ninstead of {right_scale:.3f}. MLA's softmax scale was computed from "
        "the width of a row of the KV\ncache instead of the width of a head, and YaRN's factor "
        "(mscale²) was left out.\n\n"
        "Five such bugs, measured: trueline witness. Talk to the model: trueline chat"
    )
    return int(right.differing(broken) == 0)


def _softmax_scale(engine: LLMEngine) -> float:
    mixer = engine.spec.layers[0].mixer
    assert isinstance(mixer, MLASpec)
    return mixer.softmax_scale


def _stream(engine: LLMEngine, question: str) -> None:
    engine.add_request("demo", engine.chat_prompt([{"role": "user", "content": question}]), PARAMS)
    shown, finished = 0, False
    while not finished:
        for output in engine.step():
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown, finished = len(text), output.finished
    print()


def _ask(engine: LLMEngine, sets: ProblemSets, what: str) -> Answers:
    start = time.perf_counter()
    answers = ask_together(engine, sets.problems, lambda: None)
    seconds = time.perf_counter() - start
    count = sum(answers.right)
    print(f"{what}: {count} right ({100 * answers.accuracy:.0f} %), {seconds:.1f} s", flush=True)
    return answers
