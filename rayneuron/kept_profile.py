"""What the steps of a deployment take, kept between its starts."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rayneuron import settings
from rayneuron.errors import CompileError
from rayneuron.placement.layout import rank_threads
from rayneuron.policies.chunks import limited
from rayneuron.types import Profile

if TYPE_CHECKING:
    from rayneuron.engine.runner import Runner
    from rayneuron.group.group import Group
    from rayneuron.group.opening import Runnable
    from rayneuron.preflight import Fitted

log = logging.getLogger(__name__)

_PROFILE = "profile.json"
_TIMED = {  # keys that change what a step takes; the buckets and lengths are the capacity's
    *("device", "instance", "nodes", "quantization", "kv_dtype", "tensor_parallel", "pipeline_parallel", "sequence_parallel"),
    *("micro_batches", "fused_qkv", "group_query_attention", "shard_over_sequence", "capacity_factor", "on_device_sampling", "compile"),
    "speculative_config",
}


def profile(model: Runnable, fitted: Fitted, runner: Runner | Group) -> Profile:
    """What steps take: measured by the first start of its kind on this machine. Later ones read it, and so cut prompts as that one did;
    where they find that it was taken on a busier machine, it is taken once more, for all that come."""
    from rayneuron import devices
    from rayneuron.compile_cache import cache
    from rayneuron.engine import profile as profiles

    config, made = model.config, []
    said = config.model_dump(include=_TIMED) | {"threads": rank_threads(config, fitted.layout, settings.threads())}
    padded = devices.pads(config.device)
    parts: dict[str, Any] = {"built": devices.built(config.device), "said": said, "model": model.raw, "dtype": model.dtype}
    parts |= {"capacity": model.capacity, "padded": padded}
    if config.lora is not None and config.few_graphs:  # a step reads all slots, whoever is in it
        parts["adapters"] = [config.lora.slots(resident=True), config.lora.max_lora_rank, config.lora.target_modules]

    def fill(folder: Path) -> None:
        made.append(profiles.measure(runner, model.arch.vocab, padded=padded))
        (folder / _PROFILE).write_bytes(msgspec.json.encode(made[0]))

    try:
        for turn in itertools.count():
            folder = devices.kept(config.device, config.compile.cache).get_or_build(cache.key("step times", turn=turn, **parts), fill)
            found = msgspec.json.decode((folder / _PROFILE).read_bytes(), type=Profile)
            if made or not profiles.outdated(found, runner, model.arch.vocab):
                break
    except (OSError, CompileError, msgspec.MsgspecError) as problem:
        log.warning("what steps take cannot be kept for the next start: %s", problem)
        found = made[0] if made else profiles.measure(runner, model.arch.vocab, padded=padded)
    return limited(found, config.prefill_chunk_ms)
