"""One question to one model, in a process of its own: JSON in, JSON out."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayneuron import settings
from rayneuron.llm import LLM
from rayneuron.types import SamplingParams

_STEPS = 200


def main() -> None:
    """`sys.argv[1]`: model, prompt, tokens, options of a deployment, cores, and the action."""
    said = json.loads(sys.argv[1])
    if said.get("cores"):
        settings.export({"NEURON_RT_VISIBLE_CORES": ",".join(map(str, range(said["cores"])))})
    action = {"verbs": _verbs, "compile": _compile, "kept": _kept, "moved": _moved, "sampled": _sampled, "memory": _memory, "time": _time}
    print(json.dumps(action.get(said.get("action"), _tokens)(said)))


def _verbs(said: dict[str, Any]) -> dict[str, Any]:
    from rayneuron.neuron_check import probes

    return probes.measured(Path(said["options"]["compile"]["cache"]))


def _open(said: dict[str, Any]) -> LLM:
    return LLM(said["model"], skip_tokenizer_init=True, **said["options"])


def _greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids)


def _tokens(said: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=said["tokens"], ignore_eos=True, logprobs=2)
    with _open(said) as llm:
        out = llm.generate({"prompt_token_ids": said["prompt"]}, params)[0].outputs[0]
    own = [entry[token].logprob for entry, token in zip(out.logprobs or [], out.token_ids, strict=True)]
    near = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in out.logprobs or []]
    return {"ids": list(out.token_ids), "logprobs": own, "ties": [len(e) > 1 and e[0] - e[1] < 1e-3 for e in near]}


def _compile(said: dict[str, Any]) -> dict[str, Any]:
    from rayneuron.compiling import compile_ahead
    from rayneuron.config import parse

    told: list[str] = []
    started = time.monotonic()
    config = parse({"model": {"path": said["model"], "skip_tokenizer_init": True}, **said["options"]})
    compile_ahead(config, None, told.append, lambda done, total: None)
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) << 10
    return {"graphs": int(told[0].split()[0]), "seconds": time.monotonic() - started, "memory_bytes": most}


def _device(llm: LLM) -> Any:
    return llm.engine.runner.device  # type: ignore[attr-defined]  # one process, so a Runner


def _kept(said: dict[str, Any]) -> dict[str, Any]:
    with _open(said) as llm:
        sums = []
        for count in (1, 2):
            _greedy(llm, said["prompt"], count)
            sums.append(float(_device(llm).state("kv_0_k", 0).float().abs().sum()))
    return {"before": sums[0], "after": sums[1]}


def _moved(said: dict[str, Any]) -> dict[str, Any]:
    prompt = said["prompt"]
    with _open(said) as llm:
        _greedy(llm, prompt, 1)  # in the first block, which nobody has overwritten since
        device = _device(llm)
        device.kv_write([1], device.kv_read([0]))
        here, there = (_continued(llm, block, prompt[-1], len(prompt) - 1) for block in (0, 1))
    return {"here": here, "there": there}


def _continued(llm: LLM, block: int, token: int, position: int, count: int = 8) -> list[int]:
    """Tokens behind one that stands in a block, by decode steps of that row alone."""
    ids = []
    for _ in range(count):
        shape, batch = _decode(llm, 1)
        batch.tokens[0], batch.positions[0], batch.rows[0] = token, position, block
        batch.blocks[0], batch.slots[0] = block, block * llm.engine.capacity.block + position
        token, position = int(_device(llm).start(shape, batch).wait().ids[0, 0]), position + 1
        ids.append(token)
    return ids


def _decode(llm: LLM, rows: int) -> tuple[Any, Any]:
    """The shape of a decode step, and its idle rows."""
    from rayneuron.devices.base import LIKELIEST
    from rayneuron.devices.idle import idle
    from rayneuron.engine.buckets import decode_shape

    shape = decode_shape(llm.engine.capacity, rows, llm.engine.capacity.length, LIKELIEST)
    return shape, idle(shape, llm.engine.capacity.space)


def _sampled(said: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=4, ignore_eos=True)
    with _open(said) as llm:
        prompts = [{"prompt_token_ids": said["prompt"]}] * 200
        firsts = [o.outputs[0].token_ids[0] for o in llm.generate(prompts, params)]
    return {"choices": len(firsts), "distinct": len(set(firsts))}


def _memory(said: dict[str, Any]) -> dict[str, Any]:
    from rayneuron.placement.fitting import Wanted, capacity_of, graphs_of, stage_memory
    from rayneuron.placement.plan import read_raw

    with _open(said) as llm:
        folder = next(Path("/sys/devices/virtual/neuron_device").glob("neuron*/neuron_core*/stats/memory_usage/device_mem"))
        found = {file.parent.name: int(file.read_text()) for file in folder.glob("*/present")}
        want = Wanted(llm.config, read_raw(llm.config))
        capacity = capacity_of(llm.config, want.raw)
        planned = stage_memory(want, capacity, llm.config.tensor_parallel, 1)[0]
        counts = {"graphs": len(graphs_of(llm.config, capacity)), "layers": llm.engine.runner.arch.layers}  # type: ignore[attr-defined]
    parts = {"weights": planned.weights, "kv": planned.kv, "runtime": planned.runtime, "total": planned.total}
    return {"found": found, "planned": parts, **counts}


def _time(said: dict[str, Any]) -> dict[str, Any]:
    """Of a decode step: what `start` computes beside the SDK's own call (processor time of this thread: the stand-in's devices compute in
    this interpreter), that call, and fetching what is there already; `seated_ms` where no row of the batch is at its own KV row. Steps are
    queued, so that the call does not wait for the device."""
    said["options"]["compile"] = {**said["options"].get("compile", {}), "async_mode": True}
    took: tuple[list[tuple[float, float, float, float]], ...] = ([], [])
    with _open(said) as llm:
        device = _device(llm)
        inside = device._model.forward = Timed(device._model.forward)
        start = Timed(device.start)
        batches, block = [], llm.engine.capacity.block
        for turned in (0, 1):
            shape, batch = _decode(llm, llm.engine.capacity.rows)
            for i in range(shape.rows):
                row = (i + turned) % shape.rows
                batch.rows[i], batch.blocks[i], batch.slots[i], batch.positions[i] = row, row, row * block + 5, 5
            batches.append(batch)
        for i in range(2 * _STEPS):
            pending = start(shape, batches[i % 2])
            pending.wait()
            fetch = Timed(pending.wait)
            fetch()
            took[i % 2].append((start.worked - inside.worked, inside.worked, inside.took, fetch.took))
    ours, work, call, fetched = (statistics.median(times) * 1000 for times in zip(*took[0], strict=True))
    seated = statistics.median(step[0] for step in took[1]) * 1000
    return {"host_ms": ours, "seated_ms": seated, "sdk_ms": work, "call_ms": call, "fetch_ms": fetched, "steps": _STEPS}


class Timed:
    """A function, how long its last call took, and how much of that this thread had a processor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.took = self.worked = 0.0
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        began, worked = time.perf_counter(), time.thread_time()
        out = self._function(*args, **named)
        self.took, self.worked = time.perf_counter() - began, time.thread_time() - worked
        return out
