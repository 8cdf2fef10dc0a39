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

from trueline.server.process.messages import STEP_BUCKETS

if TYPE_CHECKING:
    from trueline.server.process.client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
             1.0, 2.5, 5.0, 10.0, 20.0, 40.0)  # fmt: skip
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
           50.0, 60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one token to the next", PER_TOKEN),
    "request_time_per_output_token_seconds": ("A request's mean time per token", PER_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the last token", REQUEST),
    "request_queue_time_seconds": ("From arrival to the first step", REQUEST),
    "request_prefill_time_seconds": ("From the first step to the first token", REQUEST),
    "request_decode_time_seconds": ("From the first token to the last", REQUEST),
}


class Metrics:
    def __init__(self, prefix: str, model: str) -> None:
        self.prefix, self.model = prefix, model
        # a time stamp beside every counter, which nobody charts
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._timers: dict[str, Callable[[float], None]] = {
            name: Histogram(
                f"{prefix}:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            ).labels(model).observe
            for name, (text, buckets) in HISTOGRAMS.items()
        }  # fmt: skip
        self._success = Counter(
            f"{prefix}:request_success",
            "Sequences that have ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            f"{prefix}:http_requests",
            "Answers by route and status",
            ["path", "status"],
            registry=self.registry,
        )

    def watch(self, engines: Sequence[EngineClient]) -> None:
        self.registry.register(_Engines(engines, self.prefix, self.model))

    def observe(self, name: str, seconds: float) -> None:
        self._timers[name](seconds)

    def ended(self, reason: str) -> None:
        self._success.labels(self.model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


LABELS = ["model_name", "engine"]


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
        }  # fmt: skip
        for name, (text, value) in gauges.items():
            yield self._one(GaugeMetricFamily, name, text, float(value))
        for name, (text, count) in counters.items():
            yield self._one(CounterMetricFamily, name, text, float(count))
        yield self._step_times()
        yield from self._start()

    def _one(self, kind: Callable[..., Metric], name: str, text: str, value: float) -> Metric:
        metric = kind(f"{self.prefix}:{name}", text, labels=LABELS)
        metric.add_metric(self.labels, value)  # type: ignore[attr-defined]
        return metric

    def _step_times(self) -> Metric:
        stats = self.engine.stats
        metric = HistogramMetricFamily(
            f"{self.prefix}:engine_step_seconds", "Steps by duration", labels=LABELS
        )
        counts = stats.step_counts or [0] * (len(STEP_BUCKETS) + 1)
        bounds = [*map(str, STEP_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        metric.add_metric(self.labels, buckets, stats.step_seconds)
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
        config = InfoMetricFamily(
            f"{self.prefix}:cache_config", "How the cache is cut", labels=LABELS
        )
        values = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "num_state_slots": str(ready.num_state_slots or 0),
            "max_model_len": str(ready.max_model_len),
        }
        config.add_metric(self.labels, values)
        yield config
