"""Routes that do work: read the body, tokenize its prompts, and submit them to the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trueline import __version__
from trueline.engine.messages import CoreRequest
from trueline.grammar.calls.forms import CallsForm
from trueline.grammar.constraint import Constraint
from trueline.output_processor import PreparedParams, RequestOutputState
from trueline.server.answers import ChatAnswers
from trueline.server.protocol import prompts
from trueline.server.protocol.chat_chunks import ChatWriter
from trueline.server.protocol.errors import renamed
from trueline.server.protocol.forms import AskedForm
from trueline.server.protocol.limits import RequestLimits
from trueline.server.protocol.messages_api.request import NAMES as MESSAGES_NAMES
from trueline.server.protocol.messages_api.request import read_count_tokens, read_messages
from trueline.server.protocol.messages_api.writer import MessagesWriter
from trueline.server.protocol.not_offered import refused
from trueline.server.protocol.requests import (
    GenerateRequest,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from trueline.server.protocol.responses import ModelCard, ModelList
from trueline.server.protocol.responses_api.request import NAMES as RESPONSES_NAMES
from trueline.server.protocol.responses_api.request import read_responses
from trueline.server.protocol.responses_api.writer import ResponsesWriter
from trueline.server.protocol.stream_chunks import CompletionWriter
from trueline.server.replies import Reply, ResponseWriter
from trueline.server.service import Generation, Service
from trueline.text.answers import AnswerReader

Read = TypeVar("Read")
FINGERPRINT = f"trueline-{__version__}"


async def completions(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_completion)
    found = await service.offload(
        size, prompts.completion_prompts, asked, service.tokenizer, limits
    )
    writer = CompletionWriter(
        f"cmpl-{uuid.uuid4().hex}", int(time.time()), FINGERPRINT, asked, service.tokenizer
    )
    return await _reply(request, size, asked, found, writer)


async def chat(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_chat)
    found = await service.prompted(
        asked.conversation, size, prompts.chat_prompt, asked, service.tokenizer, limits
    )
    writer = ChatWriter(
        f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), FINGERPRINT, asked, service.tokenizer
    )
    answers = await service.offload(size, ChatAnswers.of, service.answers, asked, found[1])
    return await _reply(request, size, asked, [found], writer, answers)


async def responses(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_responses)
    name = f"resp_{uuid.uuid4().hex}"
    with renamed(RESPONSES_NAMES):
        found = await service.offload(
            size, prompts.chat_prompt, asked, service.tokenizer, limits, None
        )
        writer = ResponsesWriter(name, int(time.time()), asked, service.tokenizer)
        answers = await service.offload(size, ChatAnswers.of, service.answers, asked, found[1])
        return await _reply(request, size, asked, [found], writer, answers)


async def messages(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_messages)
    with renamed(MESSAGES_NAMES):
        found = await service.offload(
            size, prompts.chat_prompt, asked, service.tokenizer, limits, None
        )
        writer = MessagesWriter(f"msg_{uuid.uuid4().hex}", asked)
        answers = await service.offload(size, ChatAnswers.of, service.answers, asked, found[1])
        return await _reply(request, size, asked, [found], writer, answers)


async def count_tokens(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_count_tokens)
    with renamed(MESSAGES_NAMES):
        return _json(
            await service.offload(size, prompts.count_tokens, asked, service.tokenizer, limits)
        )


async def not_offered(request: Request) -> Response:
    raise refused(request.method, request.url.path)


async def tokenize(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_tokenize)
    return _json(
        await service.prompted(asked.text, size, prompts.tokenize, asked, service.tokenizer, limits)
    )


async def detokenize(request: Request) -> Response:
    service = _service(request)
    _, size, asked = await _read(request, read_detokenize)
    return _json(await service.offload(size, prompts.detokenize, asked, service.tokenizer))


async def tokenizer_info(request: Request) -> Response:
    service = _service(request)
    return _json(prompts.tokenizer_info(service.tokenizer, service.limits()))


async def models(request: Request) -> Response:
    return _json(msgspec.json.encode(ModelList(data=_cards(_service(request)))))


async def one_model(request: Request) -> Response:
    service = _service(request)
    name = service.limits().model(request.path_params["model"])
    (card,) = (card for card in _cards(service) if card.id == name)
    return _json(msgspec.json.encode(card))


def _cards(service: Service) -> list[ModelCard]:
    length = service.check_open().max_model_len
    return [
        ModelCard(id=name, created=service.created, max_model_len=length) for name in service.models
    ]


async def _read(
    request: Request, read: Callable[[bytes, RequestLimits], Read]
) -> tuple[RequestLimits, int, Read]:
    """The limits, the size of the body in bytes, and the request that it holds. Refused before the
    body is read where the engine takes none."""
    service = _service(request)
    limits = service.limits()
    service.check_room(1)
    body = await service.bodies.read(request)
    return limits, len(body), await service.offload(len(body), read, body, limits)


async def _reply(
    request: Request,
    size: int,
    asked: GenerateRequest,
    found: Sequence[tuple[str | None, list[int]]],
    writer: ResponseWriter,
    answers: ChatAnswers | None = None,
) -> Reply:
    service = _service(request)
    num_sequences = len(found) * asked.params.n
    form: AskedForm | CallsForm | None = asked.form
    if answers is not None and (calls := answers.calls_form) is not None:
        form = calls
    constraint = await service.grammars.constraint(form)
    reader = None
    if answers is not None:
        constraint, reader = answers.constraint(constraint), answers.reader
    given = (service, writer.response_id, asked, found, constraint, reader)
    states, core = await service.offload(size * num_sequences, _states, *given)
    generation = Generation(service, states, core)
    return Reply(generation, writer, asked.stream, request.scope["log_fields"])


def _states(
    service: Service,
    response_id: str,
    asked: GenerateRequest,
    found: Sequence[tuple[str | None, list[int]]],
    constraint: Constraint | None,
    reader: Callable[[], AnswerReader] | None,
) -> tuple[list[RequestOutputState], list[CoreRequest]]:
    """One for every prompt, and the requests for the engine. Unlike the id that a client gives in a
    header, the response's is unique: the engine knows a prompt by it, and of several by its index
    too."""
    params = asked.params
    prepared = PreparedParams(params, service.tokenizer, constraint)
    chosen = {
        "bad_words": sum(map(len, prepared.bad_word_ids)),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.stop_token_ids),
    }
    service.limits().check_chosen_ids(chosen, len(found) * params.n)
    several = len(found) > 1
    names = [f"{response_id}-{i}" if several else response_id for i in range(len(found))]
    states = [
        RequestOutputState(name, text, ids, prepared, reader)
        for name, (text, ids) in zip(names, found, strict=True)
    ]
    eos = service.eos_token_ids
    core = [
        each
        for state in states
        for each in prepared.core_requests(state, eos, asked.priority, asked.cache_salt)
    ]
    return states, core


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
