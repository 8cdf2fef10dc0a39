"""Routes that do work: read the body, make prompts of it, and hand it to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trueline import __version__
from trueline.answers import Answer, Shared
from trueline.engine.messages import CoreRequest
from trueline.server.protocol import prompts
from trueline.server.protocol.frames import ChatFrames, CompletionFrames
from trueline.server.protocol.limits import Limits
from trueline.server.protocol.requests import (
    GenerateRequest,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from trueline.server.protocol.responses import ModelCard, ModelList
from trueline.server.replies import Frames, Reply
from trueline.server.service import Run, Service

Read = TypeVar("Read")
FINGERPRINT = f"trueline-{__version__}"


async def completions(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_completion)
    found = await service.aside(size, prompts.completion_prompts, asked, service.tokenizer, limits)
    frames = CompletionFrames(
        f"cmpl-{_name(request)}", int(time.time()), FINGERPRINT, asked, service.tokenizer
    )
    return await _reply(request, size, asked, found, frames)


async def chat(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_chat)
    found = await service.prompted(
        asked.conversation, size, prompts.chat_prompt, asked, service.tokenizer, limits
    )
    frames = ChatFrames(
        f"chatcmpl-{_name(request)}", int(time.time()), FINGERPRINT, asked, service.tokenizer
    )
    return await _reply(request, size, asked, [found], frames)


async def tokenize(request: Request) -> Response:
    service = _service(request)
    limits, size, asked = await _read(request, read_tokenize)
    return _json(
        await service.prompted(asked.text, size, prompts.tokenize, asked, service.tokenizer, limits)
    )


async def detokenize(request: Request) -> Response:
    service = _service(request)
    _, size, asked = await _read(request, read_detokenize)
    return _json(await service.aside(size, prompts.detokenize, asked, service.tokenizer))


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
    request: Request, read: Callable[[bytes, Limits], Read]
) -> tuple[Limits, int, Read]:
    """What is asked, and how many bytes say so: refused before it is read where nobody could
    answer."""
    service = _service(request)
    limits = service.limits()
    service.check_room(1)
    body = await service.bodies.read(request)
    return limits, len(body), await service.aside(len(body), read, body, limits)


async def _reply(
    request: Request,
    size: int,
    asked: GenerateRequest,
    found: Sequence[tuple[str | None, list[int]]],
    frames: Frames,
) -> Reply:
    service = _service(request)
    num_sequences = len(found) * asked.params.n
    answers, core = await service.aside(
        size * num_sequences, _answers, service, _name(request), asked, found
    )
    return Reply(Run(service, answers, core), frames, asked.stream, request.scope["told"])


def _answers(
    service: Service,
    name: str,
    asked: GenerateRequest,
    found: Sequence[tuple[str | None, list[int]]],
) -> tuple[list[Answer], list[CoreRequest]]:
    """And what the engine is asked for."""
    params = asked.params
    shared = Shared(params, service.tokenizer)
    chosen = {
        "bad_words": sum(map(len, shared.bad_word_ids)),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.stop_token_ids),
    }
    service.limits().check_chosen_ids(chosen, len(found) * params.n)
    answers = [
        Answer(f"{name}-{i}", text, ids, params, service.tokenizer, shared)
        for i, (text, ids) in enumerate(found)
    ]
    core = [
        each
        for answer in answers
        for each in answer.core_requests(service.eos_token_ids, asked.priority, asked.cache_salt)
    ]
    return answers, core


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _name(request: Request) -> str:
    """Unlike the id a client gives, nobody else has it."""
    name: str = request.scope["unique"]
    return name


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
