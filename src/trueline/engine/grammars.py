"""Compiles the grammars of requests beside the core's loop: one thread, grammars known by their
text. A request waits here, and nobody else does."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from weakref import finalize

from trueline.engine.live_request import LiveRequest
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.no_token_left import check_first_token
from trueline.errors import RequestRejected, described
from trueline.grammar.compiled import parser_limits
from trueline.grammar.constraint import Constraint
from trueline.grammar.guide import Guide
from trueline.grammar.vocabulary import grammar_vocabulary
from trueline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_KEPT = 128
"""Compiled grammars that are kept for the next request with the same."""


class Compiled(NamedTuple):
    request: LiveRequest
    guide: Future[Guide]
    """Its exception is RequestRejected where a grammar cannot be compiled, or allows no token."""


def no_vocabulary() -> NoReturn:
    raise RequestRejected("structured outputs need a tokenizer")


class Grammars:
    def __init__(self, vocabulary: Callable[[], LLTokenizer] = no_vocabulary) -> None:
        """`vocabulary` is called once, in the thread, when the first grammar comes, or before."""
        self._vocabulary = vocabulary
        self._kept: OrderedDict[tuple[str, bool], LLMatcher] = OrderedDict()
        self._waiting: dict[str, Compiled] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="trueline-grammars")
        self._bell = Bell()
        self.num_compiled = self.num_hits = 0
        self.compile_seconds = 0.0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def bell(self) -> Bell:
        """Readable when a compilation has ended."""
        return self._bell

    def start(self, request: LiveRequest, constraint: Constraint) -> None:
        made = self._worker.submit(self._compile, request.message, constraint)
        self._waiting[request.request_id] = Compiled(request, made)
        made.add_done_callback(lambda _: self._bell.ring())

    def drop(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.guide.cancel()

    def ready(self, *, wait_for_one: bool = False) -> list[Compiled]:
        """Those whose compilation has ended, in the order of arrival."""
        self._bell.silence()
        if wait_for_one and self._waiting:
            wait([each.guide for each in self._waiting.values()], return_when="FIRST_COMPLETED")
        found = [each for each in self._waiting.values() if each.guide.done()]
        for each in found:
            del self._waiting[each.request.request_id]
        return found

    def any_ready(self) -> bool:
        return any(each.guide.done() for each in self._waiting.values())

    def prepare(self) -> Future[LLTokenizer]:
        """Make the vocabulary now: other threads of Python stand still for a part of it."""
        return self._worker.submit(lambda: self.vocabulary)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        return self._vocabulary()

    # -- in the thread -----------------------------------------------------------------

    def _compile(self, message: CoreRequest, constraint: Constraint) -> Guide:
        """At its start, where it allows a token."""
        guide = Guide(
            constraint,
            {grammar: self._matcher(grammar, constraint) for grammar in constraint.grammars},
            message.eos_token_ids,
            ignore_eos=message.params.ignore_eos,
        )
        # llguidance's vocabulary has a token more
        check_first_token(message, guide, self.vocabulary.vocab_size - 1)
        return guide

    def _matcher(self, grammar: str, constraint: Constraint) -> LLMatcher:
        """At its start; guides copy it."""
        from llguidance import LLMatcher

        key = grammar, constraint.by_client
        if key in self._kept:
            self.num_hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        vocabulary, began = self.vocabulary, time.monotonic()
        limits = parser_limits(by_client=constraint.by_client)
        made = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        self.num_compiled += 1
        self.compile_seconds += time.monotonic() - began
        if made.is_error():
            raise RequestRejected(f"{constraint.name}: it cannot be compiled: {made.get_error()}")
        self._kept[key] = made
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return made


def not_admitted(request_id: str, error: Exception) -> CoreOutput:
    refused = isinstance(error, RequestRejected)
    words = f"request '{request_id}': it could not be admitted: {described(error)}"
    return CoreOutput(
        request_id=request_id,
        finish_reason="error",
        error=str(error) if refused else words,
        client_error=refused,
    )


def grammars_of(tokenizer: Tokenizer, vocab_size: int) -> Grammars:
    return Grammars(lambda: grammar_vocabulary(tokenizer, vocab_size))


def grammars_in(directory: Path, vocab_size: int) -> Grammars:
    """Of the tokenizer there, which is loaded in the thread."""
    return Grammars(lambda: grammar_vocabulary(Tokenizer.load(directory), vocab_size))


class Bell:
    """A file descriptor that is readable once it has been rung, until it is silenced."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._end = finalize(self, _close, self._read, self._write)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        with suppress(BlockingIOError):  # it is readable
            os.write(self._write, b"!")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass


def _close(*ends: int) -> None:
    for end in ends:
        os.close(end)
