"""What a user may choose. Frozen; decisions made from it are in the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trueline.errors import UsageError

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "e4m3fn", "e4m3fnuz")
WORDS = {
    "block_size": ("auto",),
    "snapshot_spacing": ("auto",),
    "kv_cache_group_size": ("auto", "token"),
}
"""Options that take these words beside whole numbers."""
NOT_DIVIDED = {
    "pipeline_parallel_size": "layers are not divided among ranks: use tensor_parallel_size, on "
    "several machines with nnodes",
    "decode_context_parallel_size": "every rank keeps the whole context: for more of it use "
    "kv_cache_dtype='fp8', for more requests data_parallel_size",
    "prefill_context_parallel_size": "a prompt is not divided among ranks: use "
    "tensor_parallel_size, or a larger max_num_batched_tokens",
}
"""Ways to divide a model that peers have, and what to use here."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    """Running at once; None: 64 on a CPU, 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Of a step; None: 2,048 on a CPU, 8,192 on a GPU."""
    block_size: int | Literal["auto"] = "auto"
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    """How much of the memory is ours, weights included on a GPU; None: 0.5 on a CPU, 0.9 on a GPU.
    """
    mamba_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of the recurrent state; "auto" is the model's dtype."""
    num_state_slots: int | None = None
    """States kept at once, running and as snapshots; None: as the memory allows."""
    snapshot_spacing: int | Literal["auto"] = "auto"
    """Tokens between the states that the prefix cache keeps of a long prompt."""
    kv_cache_dtype: str = "auto"
    """Of latents: "auto" (as computed), e4m3fn (also "fp8", "fp8_e4m3"), e4m3fnuz."""
    kv_cache_group_size: int | Literal["auto", "token"] = "auto"
    """Channels of an fp8 latent that share a scale: "auto" (128), a number, "token" (all)."""
    kv_cache_scale_fmt: Literal["auto", "float32", "ue8m0"] = "auto"
    """Scales of fp8 latents: "auto" (float32), float32, ue8m0 (rounded up to powers of two)."""
    index_cache_dtype: str = "auto"
    """Of the indexer's keys: "auto" (as computed), float32, bfloat16, float16, e4m3fn, e4m3fnuz."""
    index_cache_layout: str = "auto"
    """Layout of these keys: "auto" (rows), rows, planar, shuffled."""
    numerics: Literal["auto", "weights", "activations", "published"] = "auto"
    """Of weights in block fp8: "weights" multiplies what they mean with activations as computed,
    "activations" quantises these too, as published inference does; "auto": activations on a GPU of
    compute capability 9.0, unless batch_invariant, else weights. "published", of deepseek_v4 alone:
    products as with "weights", and what attention and indexer keep is rounded as the authors' own
    inference code rounds it."""
    batch_invariant: bool = False
    overlap: bool | None = None
    """Whether a step is scheduled while the one before it runs; None: on a GPU."""
    enforce_eager: bool = False
    """No captured graphs on a GPU; a CPU has none."""
    max_logprobs: int = 20
    """The most logprobs a request may ask for; -1 is no limit."""
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel_size: int = 1
    """Ranks: processes that hold and compute a part of every layer each."""
    enable_expert_parallel: bool = False
    """Routed experts are divided whole among the ranks, not each of them by its width."""
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] | None = None
    """What the ranks are: "uni" (one, in this process), "mp" (processes that this one starts),
    "ray" (actors, which Ray places), "external_launcher" (torchrun has started them); None: uni for
    one rank, mp for more."""
    data_parallel_size: int = 1
    """Replicas of the model, independent engines of tensor_parallel_size ranks each. `trueline
    serve` starts all of them behind one address."""
    data_parallel_rank: int | None = None
    """Which replica this engine is, where not all of them are behind one server: it takes its own
    GPUs, or its part of the CPU."""
    pipeline_parallel_size: int = 1
    """Accepted: 1."""
    decode_context_parallel_size: int = 1
    """Accepted: 1."""
    prefill_context_parallel_size: int = 1
    """Accepted: 1."""
    speculative_config: str | None = None
    """Accepted: None. Nothing drafts yet; draft layers of a checkpoint are left where they are."""
    nnodes: int = 1
    """Machines that the ranks are on, as many on each."""
    node_rank: int = 0
    """Which of them this is; rank 0 is on machine 0."""
    master_addr: str = "127.0.0.1"
    """Of machine 0, as the others reach it; for several machines."""
    master_port: int = 29501
    init_timeout: float = 600.0
    """Seconds that all ranks have to come."""
    engine_timeout: float = 600.0
    """Seconds that a step may take, longer than any does; then the engine is given up as hung. 0:
    never."""
    debug_collectives: bool = False
    """Before each exchange every rank states its op, shape and step, and ranks that differ are an
    error that names them, not a hang: slow, for checks. Captured steps do so when captured only."""
    ops: Mapping[str, str] = field(default_factory=dict)
    """Implementations by name, instead of the plan's choice."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """Layers of other packages by name, instead of ours."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    poison: bool = False
    """Fill every cache byte that nobody owns with NaN before each step: slow, for checks."""
    canary_interval: int | Literal["auto"] = "auto"
    """Steps from one check to the next that nobody has written to memory where no step may; 0:
    never; "auto": 32 on a CPU, 0 on a GPU."""
    canary_report_dir: str | None = None
    """Where the report of such a write goes, a JSON file; None: the system's temporary directory.
    """

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            raise UsageError(
                f"speculative_config = {self.speculative_config!r}: nothing drafts yet, with or "
                "without the draft layers of a checkpoint (mtp.*, dspark_*): accepted: None"
            )
        self._check_ranks()
        self._check_replicas()
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size",
                     "num_gpu_blocks_override", "kv_cache_memory_bytes", "num_state_slots",
                     "snapshot_spacing", "kv_cache_group_size"):  # fmt: skip
            value = getattr(self, name)
            if value is None or value in WORDS.get(name, ()):
                continue
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} = {value!r}: accepted: a whole number from 1 up")
        interval = self.canary_interval
        if interval != "auto" and (type(interval) is not int or interval < 0):
            raise UsageError(
                f"canary_interval = {interval!r}: accepted: a whole number of steps from 0 (never) "
                "up, and 'auto'"
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise UsageError(f"gpu_memory_utilization = {share!r}: accepted: (0, 1]")
        for name, accepted in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("mamba_cache_dtype", ("auto", "float32", "bfloat16", "float16")),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("kv_cache_scale_fmt", ("auto", "float32", "ue8m0")),
            ("numerics", ("auto", "weights", "activations", "published")),
            ("load_format", ("auto", "dummy")),
        ):
            if getattr(self, name) not in accepted:
                raise UsageError(f"{name} = {getattr(self, name)!r}: accepted: {accepted}")
        for name in ("kv_cache_group_size", "kv_cache_scale_fmt"):
            if self.kv_cache_dtype == "auto" and getattr(self, name) != "auto":
                raise UsageError(
                    f"{name} = {getattr(self, name)!r} is for an fp8 cache: set kv_cache_dtype too"
                )

    @property
    def backend(self) -> Literal["uni", "mp", "ray", "external_launcher"]:
        default: Literal["uni", "mp"] = "uni" if self.tensor_parallel_size == 1 else "mp"
        return self.distributed_executor_backend or default

    def _check_replicas(self) -> None:
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if type(size) is not int or size < 1:
            raise UsageError(f"data_parallel_size = {size!r}: accepted: a whole number from 1 up")
        if rank is not None and (type(rank) is not int or not 0 <= rank < size):
            raise UsageError(
                f"data_parallel_rank = {rank!r}: accepted: 0 to {size - 1} (data_parallel_size = "
                f"{size})"
            )
        if size > 1 and (self.nnodes > 1 or self.backend == "external_launcher"):
            raise UsageError(
                f"data_parallel_size = {size} is for replicas that are on one machine each, which "
                "start their ranks themselves; accepted: a server for each replica, behind a load "
                "balancer (docs/ranks.md)"
            )
        for name, instead in NOT_DIVIDED.items():
            if (value := getattr(self, name)) != 1:
                raise UsageError(f"{name} = {value!r}: accepted: 1; {instead}")

    def _check_ranks(self) -> None:
        for name, least in (("tensor_parallel_size", 1), ("nnodes", 1), ("node_rank", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"{name} = {value!r}: accepted: a whole number from {least} up")
        if type(self.master_port) is not int or not 0 < self.master_port < 65536:
            raise UsageError(f"master_port = {self.master_port!r}: accepted: 1 to 65535")
        for name in ("init_timeout", "engine_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < float("inf"):
                raise UsageError(f"{name} = {seconds!r}: accepted: seconds from 0 up")
        backends = ("uni", "mp", "ray", "external_launcher")
        if self.distributed_executor_backend not in (None, *backends):
            raise UsageError(
                f"distributed_executor_backend = {self.distributed_executor_backend!r}: accepted: "
                f"{backends}"
            )
        size, nodes = self.tensor_parallel_size, self.nnodes
        if self.backend == "uni" and size != 1:
            raise UsageError(
                f"distributed_executor_backend = 'uni' is one rank, tensor_parallel_size = {size}"
            )
        if self.node_rank >= nodes:
            raise UsageError(
                f"node_rank = {self.node_rank}: accepted: 0 to {nodes - 1} (nnodes = {nodes})"
            )
        if nodes > 1 and self.backend != "mp":
            raise UsageError(f"nnodes = {nodes} is for distributed_executor_backend = 'mp'")
        if size % nodes:
            raise UsageError(
                f"tensor_parallel_size = {size}, nnodes = {nodes}: every machine has as many "
                f"ranks; accepted: a multiple of {nodes}"
            )
