"""One HTTP request's sequences in the engine: admitted together, told together, ended together."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trueline.answers import Answer
from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.errors import RequestRejected
from trueline.outputs import RequestOutput
from trueline.server.aside import Aside
from trueline.server.config import ServerConfig
from trueline.server.limits import Bodies
from trueline.server.metrics import Metrics
from trueline.server.process.client import EngineClient
from trueline.server.process.messages import Ready
from trueline.server.process.streams import EngineDead
from trueline.server.protocol.errors import ApiError, bad_request
from trueline.server.protocol.limits import Limits
from trueline.server.protocol.requests import Conversation
from trueline.text.template_process import TemplateProcess
from trueline.text.tokenizer import Tokenizer

RETRY_SECONDS = 1
"""What a client is told to wait when there is no room, or nobody to answer."""
BIG = 1 << 12
"""Bytes of a request, or as much work, from which the event loop does not wait for it."""
PER_SCORE = 4
"""A token's logprob is as much work as so many bytes of a request."""
T = TypeVar("T")


@dataclass
class Service:
    """What every route works with."""

    engine: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    models: tuple[str, ...]
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.config.max_body_bytes, self.config.read_timeout)
        self._aside = Aside()
        self.templates = TemplateProcess()
        self._rendering = Aside()

    async def aside(self, size: int, work: Callable[..., T], *given: Any) -> T:
        """Small work at once; big work in one thread for all, so that nobody else's tokens wait
        for it, and it takes one core at most."""
        if size < BIG:
            return work(*given)
        return await self._aside.run(work, *given)

    async def prompted(
        self, asked: Conversation | str, size: int, work: Callable[..., T], *given: Any
    ) -> T:
        """`aside`; and where a template of the request's own is rendered, in a thread that nobody
        waits for but others who bring theirs."""
        own = isinstance(asked, Conversation) and asked.chat_template is not None
        if not own:
            return await self.aside(size, work, *given, None)
        return await self._rendering.run(work, *given, self.templates)

    def drain(self) -> None:
        """Nobody else is admitted, nor those who are still asking."""
        self.draining = True
        self.bodies.give_up(self._closed())

    def refusal(self) -> tuple[str, str] | None:
        """Why no request is taken now, as a word and a sentence."""
        if self.draining:
            return "draining", "the server is shutting down"
        if self.engine.state != "ready":
            return self.engine.state, self.engine.reason or f"the engine is {self.engine.state}"
        return None

    def check_open(self) -> Ready:
        if self.refusal() is not None:
            raise self._closed()
        assert self.engine.ready is not None
        return self.engine.ready

    def _closed(self) -> ApiError:
        code, message = self.refusal() or ("", "")
        return ApiError(503, message, code=code, retry_after=RETRY_SECONDS)

    def limits(self) -> Limits:
        ready = self.check_open()
        return Limits(
            models=self.models,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_logprobs=ready.max_logprobs,
            max_sequences=self.config.max_sequences,
            request_templates=self.config.trust_request_chat_template,
        )

    @property
    def eos_token_ids(self) -> list[int]:
        assert self.engine.ready is not None
        return sorted({*self.engine.ready.eos_token_ids, *self.tokenizer.eos_ids})

    def check_room(self, count: int) -> None:
        """For so many sequences more. A slow reader takes none once the engine is done with it."""
        room = self.check_open().max_num_seqs + self.config.max_num_queued
        taken = self.engine.num_open
        if count > room:
            raise bad_request(
                f"{count} sequences were asked for, and there is never room for more than {room}; "
                "ask for fewer prompts or a smaller n",
                "n",
            )
        if taken + count > room:
            raise ApiError(
                429,
                f"{taken} sequences are running or waiting, {count} more were asked for, and there "
                f"is room for {room}; try again later",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )


class Run:
    """Some answers on their way. `outputs` gives one that has news, in its whole state, when all
    the news there are have been taken: sequences of one request come together, once a step."""

    def __init__(
        self, service: Service, answers: list[Answer], requests: list[CoreRequest]
    ) -> None:
        self.service, self.answers, self.requests = service, answers, requests
        self.of_sequence = {copy.core_id: a for a in answers for copy in a.copies}
        self.arrived = time.monotonic()
        self.times = {core_id: Times() for core_id in self.of_sequence}

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        self.service.check_room(len(self.requests))
        stream = self.service.engine.generate(self.requests)
        try:
            async for news in stream:
                for each in (news, *stream.waiting()):
                    answer = self.of_sequence[each.request_id]
                    weight = _num_scores(each) * PER_SCORE
                    await self.service.aside(weight, self._take, answer, each)
                    if ended := answer.to_stop():
                        stream.abort(ended)
                yield answer.output()
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_dead") from None
        except RequestRejected as error:
            raise bad_request(str(error)) from None
        finally:
            stream.abort()

    def _take(self, answer: Answer, news: CoreOutput) -> None:
        copy = answer.of_sequence[news.request_id]
        before = copy.completion.finished
        answer.take(news)
        self._time(self.times[news.request_id], news)
        done = copy.completion
        if done.finished and not before:
            self._ended(self.times[news.request_id], len(done.token_ids), done.finish_reason or "")

    def _time(self, times: Times, news: CoreOutput) -> None:
        if news.first_scheduled is not None:
            times.scheduled = news.first_scheduled
        if not news.token_ids:
            return
        now, observe = time.monotonic(), self.service.metrics.observe
        if times.first is None:
            times.first = now
            observe("time_to_first_token_seconds", now - self.arrived)
        else:
            each = (now - times.last) / len(news.token_ids)
            for _ in news.token_ids:
                observe("inter_token_latency_seconds", each)
        times.last = now

    def _ended(self, times: Times, tokens: int, reason: str) -> None:
        metrics, now = self.service.metrics, time.monotonic()
        metrics.ended(reason)
        metrics.observe("e2e_request_latency_seconds", now - self.arrived)
        scheduled = times.scheduled
        if scheduled is not None:
            metrics.observe("request_queue_time_seconds", max(scheduled - self.arrived, 0.0))
        if times.first is None:
            return
        if scheduled is not None:
            metrics.observe("request_prefill_time_seconds", max(times.first - scheduled, 0.0))
        metrics.observe("request_decode_time_seconds", times.last - times.first)
        if tokens > 1:
            each = (times.last - times.first) / (tokens - 1)
            metrics.observe("request_time_per_output_token_seconds", each)


def _num_scores(news: CoreOutput) -> int:
    scores = news.prompt_scores or news.scores
    return len(scores) * (1 + len(scores[0].top)) if scores else 0


@dataclass(slots=True)
class Times:
    """Of a sequence, by the monotonic clock, which both processes share."""

    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
