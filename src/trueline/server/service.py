"""What the routes share; and one HTTP request's sequences in the engine, which are added, streamed
and aborted together."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, TypeVarTuple

from trueline.engine.messages import CoreOutput, CoreRequest
from trueline.engine.params import default_params
from trueline.errors import RequestRejected
from trueline.output_processor import RequestOutputState
from trueline.outputs import CompletionOutput, RequestOutput
from trueline.server.config import ServerConfig
from trueline.server.grammars import CheckedGrammars
from trueline.server.limits import BodyReader
from trueline.server.metrics import Metrics
from trueline.server.offload import OffloadThread
from trueline.server.process.messages import Ready
from trueline.server.process.replicas import Replicas
from trueline.server.process.streams import EngineDead
from trueline.server.protocol.errors import ApiError, bad_request
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.requests import Conversation
from trueline.server.protocol.responses import Health, ReplicaHealth, Status
from trueline.text.answers import AnswerFormat
from trueline.text.template_process import TemplateProcess
from trueline.text.tokenizer import Tokenizer

RETRY_SECONDS = 1
"""Of the Retry-After header, when there is no room or the engine is not ready."""
BIG = 1 << 12
"""Bytes of a request, or as much work, from which the event loop offloads it to a thread."""
PER_SCORE = 4
"""A token's logprob is as much work as so many bytes of a request."""
T = TypeVar("T")
Given = TypeVarTuple("Given")


@dataclass
class Service:
    """What every route works with."""

    engine: Replicas
    tokenizer: Tokenizer
    config: ServerConfig
    models: tuple[str, ...]
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.config.max_body_bytes, self.config.read_timeout)
        self.grammars = CheckedGrammars()
        self.answers = AnswerFormat(
            self.tokenizer,
            reasoning_parser=self.config.reasoning_parser,
            tool_call_parser=self.config.tool_call_parser,
        )
        self._offload_thread = OffloadThread()
        self.templates = TemplateProcess()
        self._template_thread = OffloadThread()
        self._default_params = default_params(self.tokenizer.generation_config)

    async def offload(self, size: int, work: Callable[[*Given], T], *given: *Given) -> T:
        """Small work at once; big work in one thread for all requests, so that the event loop goes
        on streaming, and offloaded work takes one core at most."""
        if size < BIG:
            return work(*given)
        return await self._offload_thread.run(work, *given)

    async def prompted(
        self,
        asked: Conversation | str,
        size: int,
        work: Callable[[*Given, TemplateProcess | None], T],
        *given: *Given,
    ) -> T:
        """`offload`; a template that the request brings is rendered in a thread of its own kind:
        only requests that bring one wait for it."""
        own = isinstance(asked, Conversation) and asked.chat_template is not None
        if not own:
            return await self.offload(size, work, *given, None)
        return await self._template_thread.run(work, *given, self.templates)

    def drain(self) -> None:
        """Refuses new requests, and those whose bodies are being read."""
        self.draining = True
        self.bodies.give_up(self._closed())

    def refusal(self) -> tuple[Status, str] | None:
        """Why requests are refused now, as a code and a message; None where they are not."""
        if self.draining:
            return "draining", "the server is shutting down"
        if self.engine.state != "ready":
            return self.engine.state, self.engine.reason or f"the engine is {self.engine.state}"
        return None

    def health(self) -> Health:
        """Of one engine, and where there are several of each."""
        code, reason = self.refusal() or ("ready", None)
        if len(self.engine.clients) == 1:
            return Health(code, reason)
        replicas = [ReplicaHealth(each.state, each.reason) for each in self.engine.clients]
        return Health(code, reason, replicas)

    def check_open(self) -> Ready:
        if self.refusal() is not None:
            raise self._closed()
        assert self.engine.ready is not None
        return self.engine.ready

    def _closed(self) -> ApiError:
        code, message = self.refusal() or ("ready", "")
        return ApiError(503, message, code=code, retry_after=RETRY_SECONDS)

    def limits(self) -> RequestLimits:
        ready = self.check_open()
        return RequestLimits(
            models=self.models,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_logprobs=ready.max_logprobs,
            max_sequences=self.config.max_sequences,
            request_templates=self.config.trust_request_chat_template,
            default_params=self._default_params,
        )

    @property
    def eos_token_ids(self) -> list[int]:
        assert self.engine.ready is not None
        return sorted({*self.engine.ready.eos_token_ids, *self.tokenizer.eos_ids})

    def check_room(self, count: int) -> None:
        """Raises where so many more sequences do not fit. A sequence that the engine has finished
        takes no room, however slowly its client reads."""
        self.check_open()
        room = self.engine.max_num_seqs + self.config.max_num_queued
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


class Generation:
    """One HTTP request's sequences in the engine. `outputs` yields a RequestOutput that has
    changed, in its whole state, once all outputs that have arrived are processed: what a step
    brings for several sequences is sent together."""

    def __init__(
        self, service: Service, states: list[RequestOutputState], requests: list[CoreRequest]
    ) -> None:
        self.service, self.states, self.requests = service, states, requests
        self.by_sequence = {name: state for state in states for name in state.sequence_ids}
        self.max_tokens = requests[0].params.max_tokens if requests else None
        self.arrived = time.monotonic()
        self.times = {name: Times() for name in self.by_sequence}

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        self.service.check_room(len(self.requests))
        stream = self.service.engine.generate(self.requests)
        for name, engine in stream.engines.items():
            self.times[name].engine = engine
        try:
            async for output in stream:
                for each in (output, *stream.waiting()):
                    state = self.by_sequence[each.request_id]
                    weight = _num_scores(each) * PER_SCORE
                    await self.service.offload(weight, self._update, state, each)
                    if ended := state.to_stop():
                        stream.abort(ended)
                yield state.output
        except EngineDead as error:
            raise ApiError(503, str(error), code="engine_dead") from None
        except RequestRejected as error:
            raise bad_request(str(error)) from None
        finally:
            stream.abort()

    def _update(self, state: RequestOutputState, output: CoreOutput) -> None:
        completion = state.completion(output.request_id)
        before = completion.finished
        state.update(output)
        self._time(self.times[output.request_id], output)
        if completion.finished and not before:
            reason = completion.finish_reason or ""
            times = self.times[output.request_id]
            self._ended(times, len(completion.token_ids), reason)
            self._count(times.engine, state, completion)

    def _time(self, times: Times, output: CoreOutput) -> None:
        if output.first_scheduled is not None:
            times.scheduled = output.first_scheduled
        if not output.token_ids:
            return
        now, observe = time.monotonic(), partial(self.service.metrics.observe, times.engine)
        if times.first is None:
            times.first = now
            observe("time_to_first_token_seconds", now - self.arrived)
        else:
            each = (now - times.last) / len(output.token_ids)
            for _ in output.token_ids:
                observe("inter_token_latency_seconds", each)
        times.last = now

    def _ended(self, times: Times, tokens: int, reason: str) -> None:
        metrics, now = self.service.metrics, time.monotonic()
        metrics.ended(times.engine, reason)
        observe, scheduled = partial(metrics.observe, times.engine), times.scheduled
        observe("e2e_request_latency_seconds", now - self.arrived)
        if scheduled is not None:
            observe("request_queue_time_seconds", max(scheduled - self.arrived, 0.0))
        if times.first is None:
            return
        if scheduled is not None:
            observe("request_prefill_time_seconds", max(times.first - scheduled, 0.0))
            observe("request_inference_time_seconds", max(times.last - scheduled, 0.0))
        observe("request_decode_time_seconds", times.last - times.first)
        if tokens > 1:
            each = (times.last - times.first) / (tokens - 1)
            observe("request_time_per_output_token_seconds", each)

    def _count(self, engine: int, state: RequestOutputState, ended: CompletionOutput) -> None:
        """What a sequence was and what was asked; with a prompt's last, also of all its n."""
        observe = partial(self.service.metrics.observe, engine)
        observe("request_prompt_tokens", len(state.output.prompt_token_ids))
        observe("request_generation_tokens", len(ended.token_ids))
        if (most := self.max_tokens) is not None:
            observe("request_params_max_tokens", most)
        completions = state.output.outputs
        if all(each.finished for each in completions):
            longest = max(len(each.token_ids) for each in completions)
            observe("request_max_num_generation_tokens", longest)
            observe("request_params_n", len(completions))


def _num_scores(output: CoreOutput) -> int:
    scores = output.prompt_scores or output.scores
    return len(scores) * (1 + len(scores[0].top)) if scores else 0


@dataclass(slots=True)
class Times:
    """Times of a sequence, by the monotonic clock, which both processes share."""

    engine: int = 0
    scheduled: float | None = None
    first: float | None = None
    last: float = 0.0
