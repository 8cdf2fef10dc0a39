"""Messages between the server and the engine process, as msgpack. No torch."""

from __future__ import annotations

import msgspec

from trueline.config import EngineConfig
from trueline.engine.messages import CoreOutput, CoreRequest

STEP_BUCKETS = tuple(
    float(f"{digits}e{power}")
    for power in range(-4, 1)
    for digits in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
)
"""Upper ends of the step time histogram's buckets, in seconds; one more is above them all."""
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The same for the tokens of a step."""


# -- to the engine -------------------------------------------------------------------------


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """The first message."""

    model: str
    config: EngineConfig
    tokenizer: str | None = None
    """Directory of another than the model's: grammars are of its tokens."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """All of them, or none."""

    requests: list[CoreRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The finish_reason of each is in the next StepOutputs, unless it was sent before."""

    request_ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process; whatever runs is dropped."""


# -- from the engine -----------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """While loading."""

    phase: str
    done: int = 0
    total: int = 0
    """0: nobody knows."""

    def __str__(self) -> str:
        return f"{self.phase}, {self.done / self.total:.0%}" if self.total else self.phase


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    plan_lines: list[str]
    """What was chosen and why, and what measuring has changed."""
    startup_seconds: dict[str, float]
    """By phase."""
    family: str
    vocab_size: int
    eos_token_ids: list[int]
    """The config's; a tokenizer may know more."""
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    num_blocks: int
    """That requests can hold."""
    block_size: int
    num_state_slots: int | None
    """None: the model keeps no states."""
    memory_bytes: dict[str, int]
    """What the engine has taken, by what it is for."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process ends now."""

    error: str
    exit_code: int
    canary_hit: bool = False
    """Somebody wrote to memory that was not theirs."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """None of an Add was taken."""

    request_ids: list[str]
    message: str


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is. All but the first eight are sums since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    """Held by requests."""
    num_blocks_cached: int = 0
    """Held by nobody, and known to the prefix cache."""
    num_slots: int = 0
    num_slots_used: int = 0
    num_slots_cached: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_added: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_rejected: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of the requests added."""
    num_query_tokens: int = 0
    """Of prompts that were looked up in the prefix cache."""
    num_hit_tokens: int = 0
    num_corrupted: int = 0
    """Requests ended by an error: their logits were NaN or infinite, or a step failed."""
    num_late_kernels: int = 0
    """Compiled after the engine was ready."""
    num_canary_checks: int = 0
    last_step_seconds: float = 0.0
    step_seconds: float = 0.0
    step_counts: list[int] = []
    """Steps by duration, one count a bucket of STEP_BUCKETS and one above."""
    step_token_counts: list[int] = []
    """Steps by tokens, one count a bucket of STEP_TOKEN_BUCKETS and one above."""
    num_grammars_compiled: int = 0
    num_grammar_hits: int = 0
    """Grammars that requests asked for and that were there already."""
    grammar_seconds: float = 0.0
    """Of compiling them."""


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What a step has sampled, for all requests."""

    outputs: list[CoreOutput]
    stats: Stats | None = None


ToEngine = LoadModel | Add | Abort | Stop
FromEngine = Progress | Ready | Failed | Rejected | StepOutputs
encode = msgspec.msgpack.Encoder().encode
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
decode_to_engine, decode_from_engine = _to_engine.decode, _from_engine.decode
