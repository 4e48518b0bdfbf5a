"""From a checked deployment to a running engine, with the seconds each part took."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron import hashing, kept_profile, settings
from rayneuron.config import Deployment
from rayneuron.placement.layout import rank_threads
from rayneuron.types import Profile

if TYPE_CHECKING:
    from rayneuron.engine.adapters import Adapters
    from rayneuron.engine.engine import Engine
    from rayneuron.engine.runner import Runner
    from rayneuron.engine.speculation.drafting import Speculation
    from rayneuron.group.children import Processes
    from rayneuron.group.group import Group
    from rayneuron.group.opening import Runnable
    from rayneuron.models import Progress
    from rayneuron.models.arch import Arch
    from rayneuron.preflight import Fitted
    from rayneuron.text.text import Text

log = logging.getLogger(__name__)

StageProgress = Callable[[str, int, int], None]  # stage ("weights", "graphs"), done, total


@dataclass(slots=True)
class Opened:
    """A running engine and what belongs to it. `seconds`: what each part of starting took; `generation`: generation_config.json;
    `chosen`: what this start decided, for people to read."""

    engine: Engine
    text: Text
    arch: Arch
    path: Path
    generation: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, Any] = field(default_factory=dict)


def check(config: Deployment, progress: Progress | None = None, *, opens: bool = True) -> tuple[Runnable, Fitted]:
    """Find or fetch the model (`progress`: megabytes) and hold the deployment against it. Raises ConfigError, CheckpointError, NotReady.

    opens: an engine, so that adapters have to be here; to compile for some they need not be.
    """
    from rayneuron import devices, models, preflight, sources
    from rayneuron.group.opening import Runnable
    from rayneuron.models import presharded, words
    from rayneuron.models.config_json import read_config
    from rayneuron.sources import drafts

    devices.check(config.device)
    with sources.named(sources.PATH):
        found = sources.resolve(config.model.source, progress, allow_pickle=config.model.allow_pickle)
    path = found.path
    raw = read_config(path)
    fitted = preflight.fit(config, raw, path)
    if opens:
        preflight.check_adapters(config)
    preflight.check_defaults(config, fitted, path)
    dtype = words.compute(config.dtype, raw)
    if presharded.is_presharded(path):
        ranks, stages, how, kind = config.tensor_parallel, config.pipeline_parallel, config.quantization, models.compute_type(dtype)
        presharded.check_directory(path, fitted.arch, ranks=ranks, dtype=kind, fused=config.fused_qkv, quantization=how, stages=stages)
    find = partial(sources.resolve, progress=progress, allow_pickle=config.model.allow_pickle)
    draft = drafts.draft_model(config, path, fitted.arch, fitted.capacity.length, lambda named: find(named).path)
    return Runnable(config, path, raw, fitted.arch, fitted.capacity, dtype, found.source, draft), fitted


def open_engine(
    config: Deployment,
    progress: StageProgress | None = None,
    *,
    processes: Processes | None = None,
    on_lost: Callable[[str], None] | None = None,
    imported: Callable[[], object] = bool,
) -> Opened:
    """Load, warm and open. Raises ConfigError or CheckpointError before any weight is read where that can be known.

    A model on several ranks, or on counted cores, becomes a group: `processes` says how its other workers start (default: as child
    processes), `on_lost` is called once, from any thread, when one of them is gone; `imported` when no module is left to import. Nothing is
    left of an engine that fails on the way.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "import"):
        from rayneuron.devices import host
        from rayneuron.engine.engine import Engine
        from rayneuron.engine.neuron_sampling import rule_of
        from rayneuron.engine.probe import probe
        from rayneuron.structured import Grammars
    imported()
    with _timed(seconds, "check"):
        model, fitted = check(config, None if progress is None else lambda done, total: progress("MB fetched", done, total))
        log.info("a rank will hold %s", _estimate(model))
        if config.capacity_factor is not None:
            log.info("no prefix is cached: which tokens experts drop (capacity_factor) depends on what shares a step with them")
        if model.arch.uncommon:
            said = "%s models have %s: their layers run operation by operation where others are one call"
            log.info(said, model.arch.model_type, model.arch.uncommon)
    with ThreadPoolExecutor(1, "rayneuron-tokenizer") as beside, ExitStack() as undo:
        reading = beside.submit(_text, config, model.path, seconds)  # while the weights are read

        totals: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            totals[stage] = total
            if reading.done():
                reading.result()  # a model whose tokenizer is broken ends here, not behind its last layer
            if progress is not None:
                progress(stage, done, total)

        runner = _opened(model, fitted, processes, on_lost, report, seconds, undo)
        with _timed(seconds, "graphs"):
            runner.warm(lambda done, total: report("graphs", done, total))
            probe(runner, model.arch.vocab)
        with _timed(seconds, "profile"):
            profile = kept_profile.profile(model, fitted, runner)
        text = reading.result()
        host.prepare()
        kept = hashing.fingerprint(model.path) if config.caches_prefixes(runner.capacity.length) else None
        grammars = Grammars(text, model.arch.vocab)
        undo.callback(grammars.close)
        engine = Engine(
            runner, vocab=model.arch.vocab, eos_ids=text.eos_ids, rule=rule_of(config), model=kept, profile=profile,
            grammars=grammars, adapters=_adapters(config, runner), speculation=_speculation(model, profile),
        )  # fmt: skip
        undo.pop_all()
    log.info("ready: %s", ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items()))
    return Opened(engine, text, model.arch, model.path, fitted.generation, seconds, _chosen(model, fitted, totals.get("graphs", 0)))


def _adapters(config: Deployment, runner: Runner | Group) -> Adapters | None:
    """The ledger of adapters, with those of the file on the host. Raises CheckpointError naming a wrong one."""
    from rayneuron import sources
    from rayneuron.engine.adapters import Adapters

    shelf = runner.shelf
    if config.lora is None or shelf is None:
        return None
    made = Adapters(config.lora.slots(resident=config.few_graphs), config.lora.most, shelf.drop, shelf.places)
    for name, path in config.lora.modules.items():
        with sources.named(f"{sources.ADAPTERS}.{name}"):
            made.name(name, shelf.read(path))
        log.info("adapter %s: %s", name, path)
    return made


def _chosen(model: Runnable, fitted: Fitted, graphs: int) -> dict[str, Any]:
    from rayneuron import devices

    config, held = model.config, model.capacity
    ranks = config.tensor_parallel * config.pipeline_parallel
    each = 1 if devices.ranks_per_process(config.device) > 1 else rank_threads(config, fitted.layout, settings.threads())
    return {
        "device": config.device,
        "dtype": model.dtype,
        "tensor_parallel": config.tensor_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "cores": ranks * each,
        "max_model_len": held.length,
        "rows": held.rows,
        "kv_tokens": held.blocks * held.block,
        "graphs": graphs,
    }


def open_text(config: Deployment) -> tuple[Text, Path]:
    """The words of a model, and its directory, without its weights. Raises ConfigError, CheckpointError."""
    from rayneuron import sources

    with sources.named(sources.PATH):
        path = sources.resolve(config.model.source, weights=False).path
    return _text(config, path, {}), path


async def read_text(config: Deployment) -> tuple[Text, Path]:
    """As `open_text`, on a thread."""
    return await asyncio.to_thread(open_text, config)


def _text(config: Deployment, path: Path, seconds: dict[str, float]) -> Text:
    with _timed(seconds, "tokenizer"):
        from rayneuron import sources
        from rayneuron.text.text import Text
        from rayneuron.text.wordless import Wordless

        if config.model.skip_tokenizer_init:
            return Wordless(path)
        elsewhere = config.model.tokenizer
        with sources.named(sources.TOKENIZER):
            folder = sources.resolve(elsewhere, weights=False).path if elsewhere is not None else path
        return Text(folder, chat_template=config.model.chat_template)


def _opened(
    model: Runnable, fitted: Fitted, processes: Processes | None, on_lost: Callable[[str], None] | None, report: StageProgress,
    seconds: dict[str, float], undo: ExitStack,
) -> Runner | Group:  # fmt: skip
    """One rank here, or the processes of a group, with their weights; `undo` gives it back."""
    if not fitted.layout.grouped:
        from rayneuron.group.opening import open_rank

        threads = rank_threads(model.config, fitted.layout, settings.threads())
        with _timed(seconds, "weights"):
            runner = open_rank(model, threads, lambda done, total: report("weights", done, total))
        undo.callback(runner.close)
        return runner
    from rayneuron.group.group import Group

    group = Group(model, fitted.layout, processes=processes, on_lost=on_lost)
    undo.callback(group.close)
    with _timed(seconds, "group"):
        group.meet()
    with _timed(seconds, "weights"):
        group.load(lambda done, total: report("weights", done, total))
    return group


def _speculation(model: Runnable, profile: Profile) -> Speculation | None:
    """What drafts; where nobody asked for it only with the kernels, by which a token has the same bits in any step."""
    from rayneuron import devices
    from rayneuron.engine.speculation.drafting import speculation
    from rayneuron.placement.fitting import drafting

    config, draft, said = model.config, model.draft, drafting(model.config, model.raw)
    if said is None or (config.speculative_config is None and devices.built(config.device) == "torch"):
        return None
    limit, most = (None, None) if draft is None else (draft.limit, draft.most)
    return speculation(said, profile, model.capacity, limit, config.few_graphs, most)


def _estimate(model: Runnable) -> str:
    """The memory of the largest rank, by arithmetic, before anything is read."""
    from rayneuron.placement.fitting import Wanted, stage_memory

    config, draft = model.config, None if model.draft is None else model.draft.counted
    wanted = Wanted(config, model.raw, draft=draft)
    ranks = stage_memory(wanted, model.capacity, config.tensor_parallel, config.pipeline_parallel)
    worst = max(ranks, key=lambda held: held.total)
    return f"weights {worst.weights / 2**20:.1f} MiB, KV {worst.kv / 2**20:.1f} MiB"


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started
