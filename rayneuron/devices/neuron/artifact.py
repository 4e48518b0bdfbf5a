"""Compiled graphs as a folder: its key, the manifest `neuron_config.json` with NxD's names, the list before compiling, what disagrees."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayneuron.compile_cache import cache as caching
from rayneuron.compile_cache import folder
from rayneuron.compile_cache.cache import Key
from rayneuron.devices.base import Program, Shape, Weights
from rayneuron.devices.neuron import graphs, releases
from rayneuron.devices.neuron.pipeline import World
from rayneuron.devices.neuron.targets import Target, listed, name
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models.arch import Arch
from rayneuron.models.kv import KvShape

CONFIG = "neuron_config.json"
_PACKAGE = Path(__file__).parents[2]
_SOURCES = (*(f"engine/{name}.py" for name in ("step", "passes", "sampling", "neuron_sampling")), "devices/base.py",
            *(f"devices/neuron/{name}.py" for name in ("graphs", "states", "targets", "verbs")))  # fmt: skip
_GRAPH_BYTES = 3 << 20  # a NEFF beside its constants; of the order seen for small graphs, no promise


def graphs_key(
    program: Program, targets: Sequence[Target], weights: Weights, kv: KvShape, kv_dtype: Any, world: World,
    chip: str, versions: Mapping[str, str], arguments: Mapping[str, str], feedback: bool = False, reduce_dtype: str = "fp32",
) -> Key:  # fmt: skip
    """The key of all graphs of an engine. What is saved is for processes that drive `world.local` ranks; which ones is no part of it."""
    more = {"feedback": True} if feedback else {}
    more |= {"lora_rank": weights["lora_rank"]} if "lora_rank" in weights else {}  # of shapes only its product with the slots is seen
    said = bound(program)
    files = {*(_PACKAGE / name for name in _SOURCES), *(_PACKAGE / "models").glob("*.py"), Path(inspect.getfile(_parts(program)[0]))}
    return caching.key(
        "graphs",
        program=said,
        graphs=sorted(name(t) for t in targets),
        parameters=graphs.signature(weights),
        first_layer=weights.get("first", 0),
        kv=caching.plain(kv),
        kv_dtype=kv_dtype,
        tp_degree=world.ranks,
        local_ranks_size=world.local,
        logical_nc_config=world.lnc,
        reduce_dtype=reduce_dtype,
        device=chip,
        compiler=dict(versions),
        flags=dict(arguments),
        source=caching.source_version(*files),
        **more,
    )


def _parts(program: Program) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function of a step program, and what is bound to it."""
    if isinstance(program, functools.partial):
        return program.func, program.args, program.keywords
    return program, (), {}


def vocabulary(program: Program) -> int | None:
    """How many logits the model has; None of a program that binds no architecture."""
    return next((one.vocab for one in _parts(program)[1] if isinstance(one, Arch)), None)


def bound(program: Program) -> dict[str, Any]:
    """A step program as data. Raises CompileError for one that holds anything else than data."""
    function, args, keywords = _parts(program)
    try:
        name = f"{function.__module__}.{function.__qualname__}"
        return {"function": name, "args": caching.plain(args), "keywords": caching.plain(keywords)}
    except ValueError as problem:
        raise CompileError(f"this step program cannot be compiled ahead of time: {problem}") from None


def write(draft: Path, key: Key, targets: Sequence[Target]) -> None:
    """Write the manifest of compiled graphs."""
    fields = dict(key.fields)
    shapes = [t for t in targets if isinstance(t, Shape)]
    said = {
        "neuron_config": {
            "tp_degree": fields["tp_degree"],
            "world_size": fields["tp_degree"],
            "local_ranks_size": fields["local_ranks_size"],
            "logical_nc_config": fields["logical_nc_config"],
            "target": fields["device"],
            "max_batch_size": max(s.rows for s in shapes),
            "tkg_batch_size": max((s.rows for s in shapes if s.tag == "decode"), default=1),
            "seq_len": max(s.length for s in shapes),
            "max_context_length": max(s.tokens for s in shapes),
            "context_encoding_buckets": sorted({s.tokens for s in shapes if s.tag == "prefill"}),
            "token_generation_buckets": sorted({s.length for s in shapes if s.tag == "decode"}),
            "token_generation_batches": sorted({s.rows for s in shapes if s.tag == "decode"}),
            "kv_cache_batch_size": fields["kv"]["space"]["rows"],
            "attention_dtype": fields["kv_dtype"],
            "is_continuous_batching": True,
            "save_sharded_checkpoint": False,
        },
        "graphs": [name(t) for t in targets],
        "key": fields,
        "digest": key.digest,
    }
    (draft / CONFIG).write_text(json.dumps(said, indent=1, sort_keys=True))


def opened(path: Path, key: Key) -> Path:
    """A folder that `rayneuron compile --out` wrote, if it is whole and fits. Raises ConfigError with what both sides say."""
    try:
        said = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        said = f"compile.artifact: {path} holds no {CONFIG}; write the folder with `rayneuron compile DEPLOYMENT.yaml --out {path}`"
        raise ConfigError(said, param="compile.artifact") from None
    problem = folder.damage(path)
    if problem is not None:
        raise ConfigError(f"compile.artifact: {path} is damaged: {problem}; compile it again", param="compile.artifact")
    differing = caching.difference(dict(key.fields), said["key"])
    if differing:
        raise ConfigError(
            f"the compiled graphs in {path} do not fit this deployment: {caching.said(differing)}. Change the deployment, or compile again"
        )
    return path


def check_cores(visible: str | None, ranks: int, bound: tuple[str, str] | None = None, name: str = "the model") -> str:
    """Refuse to start where NEURON_RT_VISIBLE_CORES is unset (the runtime takes that for all cores) or of another number, or where the
    runtime of this process is `bound` to other cores, by whom; returns the cores. Raises ConfigError."""
    if visible is None:
        raise ConfigError(
            "NEURON_RT_VISIBLE_CORES is not set, and the runtime would take every core; name the instance in the deployment "
            f"(instance: inf2.48xlarge), or export NEURON_RT_VISIBLE_CORES=0-{ranks - 1}"
        )
    cores = releases.parse_visible(visible)
    if cores != tuple(range(cores[0], cores[0] + ranks)):
        raise ConfigError(f"NEURON_RT_VISIBLE_CORES={visible} is not the {ranks} cores in a row that {ranks} ranks need")
    if cores[0] % ranks:
        raise ConfigError(f"NEURON_RT_VISIBLE_CORES={visible}: {ranks} cores must start at a multiple of {ranks}, not at {cores[0]}")
    releases.check_bound(bound, visible, name)
    return visible


def listing(targets: Sequence[Target], kv_bytes: int, weights_bytes: int) -> str:
    """What is going to be compiled, a line a kind of graph, with the estimated sizes."""
    lines = [f"{len(targets)} graphs:", *listed(targets)]
    lines.append(
        f"a rank holds {weights_bytes / 2**20:.1f} MiB of weights and {kv_bytes / 2**20:.1f} MiB of KV; "
        f"the compiled graphs take about {len(targets) * _GRAPH_BYTES / 2**20:.0f} MiB"
    )
    return "\n".join(lines)
