"""What is asked of cores: tokens of whole models against the CPU's, KV that stays and moves, memory, time on the host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayneuron.neuron_check.steps import Differs, Item, Machine, NotHere
from rayneuron.placement.memory import LAYERS, MICROCODE_BYTES

_OPTIONS = {"max_model_len": 128, "max_num_seqs": 4, "prefill_chunk_tokens": 32}
_TOKENS = 64
_PROMPT = [5, 9, 100, 3, 17, 42]
_WITHIN = 0.10  # of what is planned
_OURS_MS = 0.3  # of a step
_MEMORY = "neuron*/neuron_core*/stats/memory_usage/device_mem"
CODE = "from rayneuron.neuron_check.child import main; main()"


def ask(machine: Machine, **said: Any) -> dict[str, Any]:
    """What a process of its own found; the runtime keeps its cores until it ends. Raises Differs with the end of what it wrote."""
    options = {**_OPTIONS, **said.get("options", {})}
    options["compile"] = {"cache": str(machine.folder / "cache"), **options.get("compile", {})}
    given = {"model": machine.model, "prompt": _PROMPT, "tokens": _TOKENS, **said, "options": options}
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(given)], capture_output=True, text=True, timeout=7200, check=False)
    if done.returncode:
        raise Differs(f"{json.dumps(said)} failed: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _neuron(ranks: int, **more: Any) -> dict[str, Any]:
    return {"cores": ranks, "options": {"device": "neuron", "tensor_parallel": ranks, "dtype": "fp32"} | more}


def compiled(machine: Machine) -> str:
    """A tiny deployment, compiled ahead: the graphs that were promised, and the most memory of a compiler."""
    said = ask(machine, action="compile", **_neuron(1))
    return f"{said['graphs']} graphs in {said['seconds']:.0f} s, most memory of a process {said['memory_bytes'] >> 20} MiB"


def verbs(machine: Machine) -> str:
    """Each verb on a core, against the CPU's numbers, and its time beside the SDK's own operator or another form; then what they avoid."""
    found = ask(machine, action="verbs", cores=1)
    said = [f"{name}: {_verb(one)}" for name, one in found.items()]
    wrong = [name for name, one in found.items() if not (one["like"] or one["avoided"] or one.get("right"))]
    if wrong:
        raise Differs(f"{', '.join(wrong)} differ; {'; '.join(said)}")
    return "; ".join(said)


def _verb(one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"failed ({one['failed']})"
    ids = f", ids by {one['places']}" if one["places"] else ""
    beside = f" (does the work of {one['like']})" if one["like"] else ""
    return f"off by {one['off']:.0e}{ids}, {one['ms']:.2f} ms{beside}{'' if one['right'] else ', WRONG'}"


def tokens(machine: Machine) -> str:
    """Greedy tokens of one core are the CPU's, and log-probabilities nearly so."""
    want, got = ask(machine, options={"dtype": "fp32"}), ask(machine, **_neuron(1))
    return _alike(want, got, "1 core")


def degrees(machine: Machine) -> str:
    """The same over more cores."""
    want = ask(machine, options={"dtype": "fp32"})
    return "; ".join(_alike(want, ask(machine, **_neuron(ranks)), f"{ranks} cores") for ranks in machine.degrees if ranks > 1)


def _alike(want: dict[str, Any], got: dict[str, Any], where: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(want["ids"], got["ids"], strict=True)) if a != b), _TOKENS)
    off = max(abs(a - b) for a, b in zip(want["logprobs"][: same + 1], got["logprobs"][: same + 1], strict=True))
    said = f"{where}: {same} of {_TOKENS} tokens equal, log-probabilities within {off:.1e}"
    if off > 0.05 or (same < _TOKENS and not want["ties"][same]):
        raise Differs(f"{said}; token {same} is {got['ids'][same : same + 1]}, not {want['ids'][same : same + 1]}")
    return said


def kept(machine: Machine) -> str:
    """KV is on the device, and grows by a step."""
    said = ask(machine, action="kept", **_neuron(1))
    if not 0 < said["before"] != said["after"] > 0:
        raise Differs(f"kv_0_k sums to {said['before']}, after one more step to {said['after']}: states are not aliased")
    return f"kv_0_k sums to {said['before']:.3f}, after one more step to {said['after']:.3f}"


def moved(machine: Machine) -> str:
    """A row read by the host and written to another continues as the first does."""
    said = ask(machine, action="moved", **_neuron(1))
    if said["there"] != said["here"]:
        raise Differs(f"the copy continues with {said['there']}, the original with {said['here']}")
    return f"both rows continue with {said['here']}"


def sampled(machine: Machine) -> str:
    """Two hundred drawn choices; the runtime would say 1003 where a number was none."""
    said = ask(machine, action="sampled", **_neuron(1))
    return f"{said['choices']} choices, {said['distinct']} first tokens, none failed"


def memory(machine: Machine) -> str:
    """What a loaded core holds by kind, against the plan, and what the plan's two figures would have to be."""
    if not any(Path("/sys/devices/virtual/neuron_device").glob(_MEMORY)):
        raise NotHere("no core says what it holds (sysfs)")
    return compared(ask(machine, action="memory", **_neuron(1)))


def compared(said: Mapping[str, Any]) -> str:
    """Bytes by kind as sysfs names them, beside the plan's. Raises Differs."""
    found, planned = said["found"], said["planned"]
    code = sum(size for kind, size in found.items() if kind in ("model_code", "dma_rings")) - MICROCODE_BYTES
    shared = sum(size for kind, size in found.items() if kind not in ("tensors", "constants", "model_code", "dma_rings")) + MICROCODE_BYTES
    graph = code / said["graphs"] * LAYERS / said["layers"]
    text = f"found {found}, planned {planned}; by it GRAPH_BYTES is {graph / 2**20:.0f} MiB and SHARED_BYTES {shared / 2**20:.0f} MiB"
    if abs(sum(found.values()) - planned["total"]) > _WITHIN * planned["total"]:
        raise Differs(text)
    return text


def host_time(machine: Machine) -> str:
    """What a step costs beside the device: ours, the SDK's call that hands inputs to every rank, and fetching what a rank has."""
    ranks = max(machine.degrees)
    said = ask(machine, action="time", **_neuron(ranks, max_num_seqs=16))
    text = (
        f"a step of 16 rows over {ranks} ranks: {said['host_ms']:.3f} ms of a processor ours, {said['host_ms'] / said['sdk_ms']:.1f} times "
        f"the SDK's call, which takes {said['call_ms']:.3f} ms until the device has its inputs; {said['seated_ms']:.3f} ms ours where all "
        f"rows have to be put at others; {said['fetch_ms']:.3f} ms to fetch its outputs (medians of {said['steps']} steps)"
    )
    most_ms = max(said["host_ms"], said["seated_ms"])
    if most_ms > _OURS_MS or most_ms + said["call_ms"] > 2:
        raise Differs(text)
    return text


def overlapping(machine: Machine) -> str:
    """Async mode gives the same tokens."""
    return _alike(ask(machine, options={"dtype": "fp32"}), ask(machine, **_neuron(1, compile={"async_mode": True})), "async")


def small_numbers(machine: Machine) -> str:
    """int8 and float8 weights, float8 KV: runs, and stays near."""
    want, out = ask(machine, options={"dtype": "fp32"}), []
    for name, more in (("int8", {"quantization": "int8"}), ("f8e4m3", {"quantization": "f8e4m3"}), ("f8e4m3 KV", {"kv_dtype": "f8e4m3"})):
        got = ask(machine, **_neuron(1, **more))
        out.append(f"{name}: first log-probability {abs(got['logprobs'][0] - want['logprobs'][0]):.2f} off")
    return "; ".join(out)


COMPILED = (
    Item(14, "compile", "rayneuron compile of a tiny model", "every graph of the list, without a core",
         "[F137]: compile.workers: 1, or more memory; the log that is named", compiled),
)  # fmt: skip
CORE = (
    Item(15, "core", "every verb of step 13 on a core, against the CPU", "off by less than 2e-2 (bf16) or 1e-3, no NRT 1003",
         "report the verb that is named: its graph is in step 13's form", verbs),
    Item(16, "core", f"greedy, {_TOKENS} tokens, one core", "the CPU's tokens up to ties, log-probabilities within 0.05",
         "report the first token that differs, with the log of step 13", tokens),
    Item(17, "core", "read_from_neuron_buffer('kv_0_k'), before and after a step", "above zero, and changed",
         "0: states are not aliased (step 9)", kept),
    Item(18, "core", "kv_read of a row, kv_write to another, continue from both", "equal tokens",
         "report: offsets or dtype of the graphs that move KV", moved),
    Item(19, "core", "the same tokens over 2, 8, ... cores", "the CPU's tokens", "NEURON_RT_LOG_LEVEL=INFO: replica groups", degrees),
    Item(20, "core", "temperature 0.7, top_p 0.9, 200 choices; neuron-monitor's error_summary", "no NRT 1003",
         "report: an infinity is left in the graph that samples", sampled),
    Item(21, "core", f"/sys/devices/virtual/neuron_device/{_MEMORY}", "within 10 % of the plan",
         "with the model you serve (--model): write the two figures into placement/memory.py, and report", memory),
    Item(22, "core", "rayneuron serve deployments/inf2_three_models.yaml --application chat",
         "compiled < 60 min, loaded < 3 min, a token of one row < 10 ms, of 32 < 25 ms (from bandwidth, a guess)", "step 23"),
    Item(23, "core", "neuron-profile capture of the decode graph", "KV and weights read once", "KV several times: report with the profile"),
    Item(24, "core", "time of a step on the host, without the device's", "ours <= 0.3 ms, with the SDK's call < 2 ms",
         "report the model and its ranks", host_time),
    Item(25, "core", "compile.async_mode", "the same tokens", "leave it off", overlapping),
    Item(26, "core", "rayneuron serve deployments/inf2_three_models.yaml; neuron-ls", "3 processes, 8 cores each", "rayneuron doctor"),
    Item(27, "core", "kill -9 one replica", "the others serve, its cores are free, it comes back", "NEURON_RT_RESET_CORES=1; the driver"),
    Item(28, "core", "int8 and float8 weights, float8 KV", "they run, and stay near the CPU's float32", "leave the one out", small_numbers),
    Item(29, "core", "max_model_len: 32768, one request", "no scratchpad error", "compile.flags: --hbm-scratchpad-page-size=2048"),
)  # fmt: skip
