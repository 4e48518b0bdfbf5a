"""From a checked deployment to a running engine, with the seconds each part took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron import hashing, settings
from rayneuron.config import Deployment

if TYPE_CHECKING:
    import torch

    from rayneuron.devices import Ahead
    from rayneuron.devices.base import Program
    from rayneuron.engine.buckets import Capacity
    from rayneuron.engine.engine import Engine
    from rayneuron.engine.runner import Runner
    from rayneuron.group.children import Processes
    from rayneuron.group.group import Group
    from rayneuron.models.arch import Arch
    from rayneuron.placement.layout import Layout
    from rayneuron.text.text import Text

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage ("weights", "graphs"), done, total


@dataclass(slots=True)
class Opened:
    """A running engine and what belongs to it. `seconds`: what each part of starting took; `generation`: generation_config.json."""

    engine: Engine
    text: Text
    arch: Arch
    path: Path
    generation: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checked:
    """A deployment that its model directory can run, as far as can be known without reading a weight."""

    config: Deployment
    path: Path
    raw: dict[str, Any]
    generation: dict[str, Any]
    arch: Arch
    dtype: torch.dtype
    capacity: Capacity
    layout: Layout

    @property
    def ahead(self) -> Ahead:
        """What a device is told where this process holds the whole model."""
        from rayneuron.group.ahead import ahead

        return ahead(self.config, self.capacity.length, raw=self.raw)


def check(config: Deployment) -> Checked:
    """Find the model and hold the deployment against it, in seconds. Raises ConfigError or CheckpointError with what to write instead."""
    from rayneuron import devices, preflight
    from rayneuron.models import presharded
    from rayneuron.models.config_json import read_config

    devices.check(config.device)
    path = resolve(config.model.path)
    raw = read_config(path)
    fitted = preflight.fit(config, raw, path)
    preflight.check_defaults(config, fitted, path)
    dtype = compute_dtype(config.dtype, raw)
    if presharded.is_presharded(path):
        ranks, stages, how = config.tensor_parallel, config.pipeline_parallel, config.quantization
        presharded.check_directory(path, fitted.arch, ranks=ranks, dtype=dtype, fused=config.fused_qkv, quantization=how, stages=stages)
    return Checked(config, path, raw, fitted.generation, fitted.arch, dtype, fitted.capacity, fitted.layout)


def open_engine(
    config: Deployment,
    progress: Progress | None = None,
    *,
    processes: Processes | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> Opened:
    """Load, warm and open. Raises ConfigError or CheckpointError before any weight is read where that can be known.

    A model on several ranks, or on counted cores, becomes a group: `processes` says how its other workers start (default: as child
    processes), `on_lost` is called once, from any thread, when one of them is gone.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "import"):
        from rayneuron.devices import host
        from rayneuron.engine.engine import Engine
        from rayneuron.engine.neuron_sampling import rule_of

    with _timed(seconds, "check"):
        checked = check(config)
        log.info("a rank will hold %s", estimate(checked))
        if config.capacity_factor is not None:
            log.info("no prefix is cached: which tokens experts drop (capacity_factor) depends on what shares a step with them")
    with ThreadPoolExecutor(1, "rayneuron-tokenizer") as beside:  # the tokenizer is read while the weights are
        reading = beside.submit(_text, config, checked.path, seconds)
        runner = _runner(checked, processes, on_lost)

        def report(stage: str, done: int, total: int) -> None:
            if reading.done():
                reading.result()  # a model whose tokenizer is broken ends here, not behind its last layer
            if progress is not None:
                progress(stage, done, total)

        try:
            _prepare(runner, checked, report, seconds)
            text = reading.result()
            host.prepare()
            model = hashing.fingerprint(checked.path) if config.caches_prefixes(checked.capacity.length) else None
            engine = Engine(runner, vocab=checked.arch.vocab, eos_ids=text.eos_ids, rule=rule_of(config), model=model)
        except BaseException:
            runner.close()  # nothing is left of an engine that fails on the way
            raise
    log.info("ready: %s", ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()))
    return Opened(engine, text, checked.arch, checked.path, checked.generation, seconds)


def _text(config: Deployment, path: Path, seconds: dict[str, float]) -> Text:
    with _timed(seconds, "tokenizer"):
        from rayneuron.text.text import Text
        from rayneuron.text.wordless import Wordless

        if config.model.skip_tokenizer_init:
            return Wordless(path)
        return Text(config.model.tokenizer or path, chat_template=config.model.chat_template)


def _runner(checked: Checked, processes: Processes | None, on_lost: Callable[[str], None] | None) -> Runner | Group:
    from rayneuron import devices, models

    config = checked.config
    if len(checked.layout.workers) > 1 or config.instance is not None:
        from rayneuron.group.group import Group

        kind = str(checked.dtype).removeprefix("torch.")
        group = Group(config, checked.layout, checked.arch, checked.capacity, kind, checked.path, processes=processes, on_lost=on_lost)
        return group.invite()
    from rayneuron.engine.runner import Runner

    device = devices.open(
        config.device,
        ahead=checked.ahead,
        dtype=checked.dtype,
        kv_dtype=models.kv_type(config.kv_dtype),
        threads=config.threads or settings.threads(),
    )
    return Runner(checked.arch, device, checked.capacity, program(config, checked.arch, checked.dtype))


def _prepare(runner: Runner | Group, checked: Checked, report: Progress, seconds: dict[str, float]) -> None:
    """Load weights, make every graph ready and look at the first logits; first the processes of a group meet."""
    from rayneuron.engine.probe import probe
    from rayneuron.engine.runner import Runner

    if isinstance(runner, Runner):
        with _timed(seconds, "weights"):
            runner.load(rank_weights(checked, checked.ahead, report))
        with _timed(seconds, "graphs"):
            runner.warm(lambda done, total, shape: report("graphs", done, total))
            probe(runner, checked.arch.vocab)
        return
    with _timed(seconds, "group"):
        runner.meet()
    with _timed(seconds, "weights"):
        runner.load(lambda done, total: report("weights", done, total))
    with _timed(seconds, "graphs"):
        runner.warm(lambda done, total: report("graphs", done, total))
        probe(runner, checked.arch.vocab)


def resolve(path: str) -> Path:
    """The model directory of `model.path`; demo:NAME makes the demo model on first use. Raises ConfigError."""
    from rayneuron import demo

    return demo.resolve(path)


def compute_dtype(name: str, raw: dict[str, Any]) -> torch.dtype:
    """The torch dtype of `dtype`, where it is auto that of `memory.dtype`."""
    import torch

    from rayneuron.placement import memory

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[memory.dtype(name, raw)]


def program(config: Deployment, arch: Arch, dtype: torch.dtype, stage: int = 0) -> Program:
    """What a step of the `stage`-th stage of this deployment is, alone or in a group."""
    from rayneuron.engine.neuron_sampling import rule_of
    from rayneuron.group import pipeline

    return pipeline.program(arch, pipeline.stage_of(config, dtype, stage), rule_of(config))


def rank_weights(checked: Checked, made: Ahead, report: Progress, stage: int = 0) -> dict[str, Any]:
    """Weights of the ranks this process drives: those of the first, and under "ranks" all of them where there are several."""
    from rayneuron.models import presharded

    config = checked.config
    local = range(made.start_rank, made.start_rank + (made.local_ranks or made.ranks))
    loaded = [
        presharded.open_weights(
            checked.path,
            checked.raw,
            checked.arch,
            dtype=checked.dtype,
            rank=rank,
            ranks=made.ranks,
            fused=config.fused_qkv,
            quantization=config.quantization,
            allow_pickle=config.model.allow_pickle,
            stage=stage,
            stages=config.pipeline_parallel,
            progress=lambda done, total, i=i: report("weights", i * total + done, total * len(local)),  # type: ignore[misc]
        )
        for i, rank in enumerate(local)
    ]
    return loaded[0] if len(loaded) == 1 else {**loaded[0], "ranks": loaded}


def estimate(checked: Checked) -> str:
    """The memory of the largest rank, by arithmetic, before anything is read."""
    from rayneuron.placement.fitting import Wanted, stage_memory

    config = checked.config
    ranks = stage_memory(Wanted(config, checked.raw), checked.capacity, config.tensor_parallel, config.pipeline_parallel)
    worst = max(ranks, key=lambda held: held.total)
    return f"weights {worst.weights / 2**20:.1f} MiB, KV {worst.kv / 2**20:.1f} MiB"


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
