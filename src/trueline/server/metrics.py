"""Prometheus metrics, under the names that dashboards for vLLM chart, behind a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trueline.server.process.messages import STEP_BUCKETS, STEP_TOKEN_BUCKETS

if TYPE_CHECKING:
    from trueline.server.process.client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
             1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
           50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
"""The same for every model, so that models can be charted together."""
SEQUENCES = (1, 2, 5, 10, 20)
# The buckets are those of vLLM's metrics of these names, and finer where our models are fast.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one token to the next", PER_TOKEN),
    "request_time_per_output_token_seconds": ("A request's mean time per token", PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token", REQUEST),
    "request_queue_time_seconds": ("From arrival to the first step", REQUEST),
    "request_prefill_time_seconds": ("From the first step to the first token", REQUEST),
    "request_decode_time_seconds": ("From the first token to the last", REQUEST),
    "request_inference_time_seconds": ("From the first step to the last token", REQUEST),
    "request_prompt_tokens": ("Tokens of a sequence's prompt", TOKENS),
    "request_generation_tokens": ("Tokens drawn for a sequence", TOKENS),
    "request_max_num_generation_tokens": ("Tokens drawn for the longest of a prompt's n sequences",
                                          TOKENS),
    "request_params_n": ("Sequences that were asked for, of each prompt", SEQUENCES),
    "request_params_max_tokens": ("max_tokens of a sequence, where it has one", TOKENS),
}  # fmt: skip
LABELS = ["model_name", "engine"]


class Metrics:
    def __init__(self, prefix: str, model: str) -> None:
        self.prefix, self.model = prefix, model
        # a time stamp beside every counter, which nobody charts
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._observers: dict[str, list[Callable[[float], None]]] = {}
        """By engine."""
        self._success = Counter(
            f"{prefix}:request_success",
            "Sequences that have ended, by reason",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            f"{prefix}:http_requests",
            "Answers by route and status",
            ["path", "status"],
            registry=self.registry,
        )

    def watch(self, engines: Sequence[EngineClient]) -> None:
        self._observers = {
            name: [each.labels(self.model, str(i)).observe for i in range(len(engines))]
            for name, each in self._histograms.items()
        }
        self.registry.register(_Engines(engines, self.prefix, self.model))

    def observe(self, engine: int, name: str, value: float) -> None:
        self._observers[name][engine](value)

    def ended(self, engine: int, reason: str) -> None:
        self._success.labels(self.model, str(engine), reason).inc()

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    """The latest Stats of every engine process: a metric has a sample for each."""

    def __init__(self, engines: Sequence[EngineClient], prefix: str, model: str) -> None:
        self.engines = [
            _Engine(engine, prefix, [model, str(i)]) for i, engine in enumerate(engines)
        ]

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for engine in self.engines:
            for metric in engine.collect():
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()


class _Engine:
    def __init__(self, engine: EngineClient, prefix: str, labels: list[str]) -> None:
        self.engine, self.prefix, self.labels = engine, prefix, labels

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats
        gauges = {
            "num_requests_running": ("Sequences in the running batch", stats.num_running),
            "num_requests_waiting": ("Sequences in the queue", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the cache's blocks that requests hold",
                stats.num_blocks_used / max(stats.num_blocks, 1),
            ),
            "prefix_cache_blocks": ("Blocks that only the prefix cache holds",
                                    stats.num_blocks_cached),
            "engine_up": ("Whether the engine takes requests", self.engine.state == "ready"),
        }  # fmt: skip
        if stats.num_slots:
            gauges["mamba_usage"] = (
                "Share of the state slots that requests hold",
                stats.num_slots_used / stats.num_slots,
            )
        counters = {
            "prompt_tokens": ("Tokens of prompts", stats.num_prompt_tokens),
            "generation_tokens": ("Tokens drawn", stats.num_generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache",
                                     stats.num_query_tokens),
            "prefix_cache_hits": ("Prompt tokens found there", stats.num_hit_tokens),
            "num_preemptions": ("Sequences thrown out of the running batch",
                                stats.num_preemptions),
            "corrupted_requests": ("Sequences ended by an error: NaN logits, or a step that failed",
                                   stats.num_corrupted),
            "engine_steps": ("Steps", stats.num_steps),
            "late_kernels": ("GPU kernels compiled after the engine was ready",
                             stats.num_late_kernels),
            "canary_checks": ("Checks that nobody has written to memory that is not theirs",
                              stats.num_canary_checks),
            "canary_hits": ("Engines that ended because somebody had",
                            self.engine.num_canary_hits),
            "grammar_compilations": ("Grammars compiled for structured outputs",
                                     stats.num_grammars_compiled),
            "grammar_cache_hits": ("Grammars of requests that had been compiled before",
                                   stats.num_grammar_hits),
            "grammar_compile_seconds": ("Spent on compiling grammars", stats.grammar_seconds),
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            yield self._one(GaugeMetricFamily, name, text, float(value))
        for name, (text, count) in counters.items():
            yield self._one(CounterMetricFamily, name, text, float(count))
        yield self._steps("engine_step_seconds", "Steps by duration", STEP_BUCKETS,
                          stats.step_counts, stats.step_seconds)  # fmt: skip
        yield self._steps("iteration_tokens_total", "Steps by tokens computed", STEP_TOKEN_BUCKETS,
                          stats.step_token_counts, stats.num_scheduled_tokens)  # fmt: skip
        yield from self._start()

    def _one(self, kind: Callable[..., Metric], name: str, text: str, value: float) -> Metric:
        metric = kind(f"{self.prefix}:{name}", text, labels=LABELS)
        metric.add_metric(self.labels, value)  # type: ignore[attr-defined]
        return metric

    def _steps(
        self, name: str, text: str, bounds: Sequence[float], counts: list[int], total: float
    ) -> Metric:
        """`counts`: empty before the engine's first message."""
        metric = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=LABELS)
        ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(counts or [0] * len(ends)), strict=True))
        metric.add_metric(self.labels, buckets, total)
        return metric

    def _start(self) -> Iterator[Metric]:
        """Start-up times and cache sizes, once the engine has loaded."""
        ready = getattr(self.engine, "ready", None)
        if ready is None:
            return
        phases = ready.startup_seconds
        yield self._one(
            GaugeMetricFamily, "startup_time_seconds", "To load the engine", sum(phases.values())
        )
        yield self._one(
            GaugeMetricFamily,
            "weight_load_duration_seconds",
            "To load the weights",
            phases.get("weights", 0.0),
        )
        memory = GaugeMetricFamily(
            f"{self.prefix}:memory_bytes", "Memory that the engine has taken, by what it is for",
            labels=[*LABELS, "kind"],
        )  # fmt: skip
        for kind, size in ready.memory_bytes.items():
            memory.add_metric([*self.labels, kind], float(size))
        yield memory
        # Without model_name, as vLLM's: dashboards match it by engine and instance.
        config = InfoMetricFamily(
            f"{self.prefix}:cache_config", "How the cache is cut", labels=["engine"]
        )
        values = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "num_state_slots": str(ready.num_state_slots or 0),
            "max_model_len": str(ready.max_model_len),
        }
        config.add_metric(self.labels[1:], values)
        yield config
