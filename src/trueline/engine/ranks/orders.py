"""What rank 0 tells the others, once a step."""

from __future__ import annotations

import msgspec

from trueline.config import EngineConfig
from trueline.engine.messages import Admission, StepMessage, Unowned


class Order(msgspec.Struct, frozen=True, kw_only=True):
    admissions: list[Admission] = []
    """Since the step before."""
    unowned: Unowned | None = None
    """To be poisoned before the step."""
    step: StepMessage | None = None
    """None: the end."""
    probed: bool = False
    """Whether rank 0 looks at the logits of every token, which all ranks have parts of."""


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is told on its standard input."""

    model: str
    config: EngineConfig
    rank: int
    local_rank: int
    local_size: int
    address: str
    port: int


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Order).decode
