"""`device: neuron` over several processes and two nodes, over the stand-in: local ranks of one world, stages, the CPU device's tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayneuron import SamplingParams, loading
from rayneuron.config import parse
from rayneuron.devices.neuron.releases import IN_FLIGHT
from rayneuron.engine.sequence import Plan
from rayneuron.errors import WorkerLost
from rayneuron.group.children import Children
from rayneuron.group.group import Group
from rayneuron.group.worker import Invitation
from rayneuron.processes import process_started
from rayneuron.types import Request

SMALL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1, "speculative_config": False,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
    "group": {"start_s": 120, "load_s": 120, "step_s": 60, "cores_s": 5},
}  # fmt: skip
PROMPTS = [[5, 9, 100, 3], list(range(20, 45)), [7]]
PARAMS = [SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
          SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2)]  # fmt: skip


class Nodes(Children):
    """Child processes that believe to be on two nodes of this machine, each with its own cores."""

    node_ips: Sequence[str] = ("127.0.0.2", "127.0.0.3")

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__()
        self._folder, self._environment = folder, environment

    def start(self, invitations: Sequence[Invitation], nodes: Sequence[int]) -> None:
        before = dict(os.environ)
        for invitation, node in zip(invitations, nodes, strict=True):
            os.environ.update(STANDIN_CORES=str(self._folder / f"cores-{node}"), **self._environment)  # as a node's own would say
            super().start([invitation], [node])
        os.environ.update({name: before.get(name, "") for name in ("STANDIN_CORES", *self._environment)})


@pytest.fixture
def nodes(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two nodes' cores and ledgers; no child may stay."""
    from neuronx_distributed.trace.nxd_model import runtime

    monkeypatch.setattr(runtime, "CLAIMED", {})  # this process may have claimed for another test
    monkeypatch.setenv("RAYNEURON_LEDGER", str(standin / "ledger"))
    monkeypatch.setenv("STANDIN_CORES", str(standin / "cores-0"))
    for name in IN_FLIGHT:
        monkeypatch.setenv(name, "")  # taken back at the end, whoever exports it
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    yield standin
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in pids if process_started(int(pid)) is not None and b"group.worker" in _command(pid)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def tokens(model: Path, processes: Children | None = None, **options: Any) -> list[list[int]]:
    config = parse({"model": {"path": str(model)}, **SMALL, "speculative_config": False, **options})  # on the CPU it drafts as it pays
    engine = loading.open_engine(config, processes=processes).engine
    try:
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
        out: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
        true = 0  # of what was drafted
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                out[delta.request_id] += delta.token_ids
            true += sum(accepted for _, accepted in engine.info.drafts)
        engine.check_ledger()
        assert bool(true) == ("speculative_config" in options)
        if processes is not None:
            assert isinstance(engine.runner, Group) and len(engine.runner.members) == len(engine.runner.layout.workers) - 1 > 0
        return list(out.values())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def want(wide: Path) -> list[list[int]]:
    """What one process on the CPU says."""
    return tokens(wide)


TWO: dict[str, Any] = {"tensor_parallel": 2, "nodes": 2, "instance": "cores:1"}
GROUPS: dict[str, dict[str, Any]] = {
    "tp4 over two nodes": {"tensor_parallel": 4, "nodes": 2, "instance": "cores:2"},
    "tp8 over two nodes": {"tensor_parallel": 8, "nodes": 2, "instance": "cores:4"},
    "two stages on two nodes": {"pipeline_parallel": 2, "nodes": 2, "instance": "cores:1"},
    "two stages of tp2 on two nodes": {"tensor_parallel": 2, "pipeline_parallel": 2, "nodes": 2, "instance": "cores:2"},
    "two stages on one node": {"tensor_parallel": 2, "pipeline_parallel": 2, "instance": "cores:4"},
    "two stages in three micro-batches": {"pipeline_parallel": 2, "micro_batches": 2, "nodes": 2, "instance": "cores:1"},
    "tp4 over two nodes, ahead": {"tensor_parallel": 4, "nodes": 2, "instance": "cores:2", "compile": {"async_mode": True}},
    "tp4 over two nodes, drafts": {"tensor_parallel": 4, "nodes": 2, "instance": "cores:2", "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}},
    "tp2 over two nodes, an int8 copy drafts": {**TWO, "speculative_config": {
        "method": "draft_model", "quantization": "int8", "num_speculative_tokens": 3, "adaptive": False}},
    "tp2 over two nodes, a draft model": {**TWO, "speculative_config": {
        "model": "demo:random:tp8", "num_speculative_tokens": 3, "adaptive": False}},
    "sequence parallel over two nodes": {"tensor_parallel": 4, "nodes": 2, "instance": "cores:2", "sequence_parallel": True},
}


QUICK = ("tp4 over two nodes",)  # and below two stages of tp2


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in GROUPS])
def test_tokens_are_the_cpu_devices(name: str, nodes: Path, wide: Path, want: list[list[int]]) -> None:
    assert tokens(wide, Nodes(nodes), device="neuron", **GROUPS[name]) == want


PATIENT = {"start_s": 120, "load_s": 900, "step_s": 900, "cores_s": 5}  # whoever waits so long fails by its own time
ENDS: dict[str, tuple[dict[str, float], str]] = {
    "KILL to_neuron 1": ({}, "worker 1, ranks 2-3 of stage 0 .* is gone"),
    "KILL forward 1": ({}, "worker 1, ranks 2-3 of stage 0 .* is gone"),  # while it warms up
    "KILL forward 9": ({}, "worker 1, ranks 2-3 of stage 0 .* is gone"),
    "STOP to_neuron 1": ({"load_s": 20}, "the Neuron runtime has loaded nothing for 20 s: the other ranks are awaited"),
    "STOP forward 9": ({"step_s": 20}, "a call into the Neuron runtime has not ended within 20 s"),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ends", [n if n == "KILL to_neuron 1" else pytest.param(n, marks=pytest.mark.slow) for n in ENDS])
def test_a_rank_that_ends_inside_the_runtime_ends_the_group(ends: str, nodes: Path, wide: Path) -> None:
    """The runtime waits for ever for one that is gone, and says nothing. Killed, the group knows at once; stopped, by its own limits."""
    limits, said = ENDS[ends]
    options = {"device": "neuron", **GROUPS["tp4 over two nodes"], "group": {**PATIENT, **limits}}
    with pytest.raises(WorkerLost, match=said):
        tokens(wide, Nodes(nodes, STANDIN_ENDS=ends), **options)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_ends_while_drafts_are_verified_ends_the_group(
    nodes: Path, wide: Path, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as the graph begins that makes and verifies them: the other rank is told, and nobody of a token of that step."""
    from neuronx_distributed.trace.nxd_model import nxd_model

    processes = Nodes(nodes)
    options = {**GROUPS["tp2 over two nodes, an int8 copy drafts"], "group": PATIENT}
    engine = loading.open_engine(parse({"model": {"path": str(wide)}, **SMALL, **options, "device": "neuron"}), processes=processes).engine
    start, verifies, killed, heard = engine.runner.start, [False], list[int](), list[int]()

    def started(plan: Plan) -> Any:
        verifies[0] = plan.tag == "verify" and not plan.fills
        return start(plan)

    def kill(graph: Any) -> None:
        if verifies[0] and not killed:
            killed.extend(processes.pids.values())
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(engine.runner, "start", started)
    monkeypatch.setattr(nxd_model, "BEFORE", [kill])
    try:
        engine.add(Request(id="a", prompt_ids=PROMPTS[0], params=PARAMS[0]))
        with pytest.raises(WorkerLost, match="worker 1, rank 1 of stage 0 .* is gone"):
            while engine.has_work:
                heard += [token for delta in engine.step() for token in delta.token_ids]
        assert killed and 1 < len(heard) < 8 and heard == want[0][: len(heard)]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_ends_while_another_compiles(nodes: Path, wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compilers of the other end too."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(nodes / "here"))
    monkeypatch.setenv("STANDIN_COMPILE_S", "900.5")
    there = {"NEURON_COMPILE_CACHE_URL": str(nodes / "there"), "STANDIN_COMPILE_S": "1", "STANDIN_ENDS": "KILL compile 2"}
    with pytest.raises(WorkerLost, match=r"worker 1, rank 1 of stage 0 .* is gone"):
        tokens(wide, Nodes(nodes, **there), device="neuron", tensor_parallel=2, nodes=2, instance="cores:1", group=PATIENT)
    assert not sleeping("900.5")


def sleeping(seconds: str) -> list[str]:
    """Compilers that take so long."""
    return [p.parent.name for p in Path("/proc").glob("[0-9]*/cmdline") if _command(p.parent.name) == f"sleep\0{seconds}\0".encode()]


@pytest.mark.slow
def test_a_node_that_compiles_for_longer_than_the_group_is_patient(nodes: Path, wide: Path, want: list[list[int]]) -> None:
    """One node finds its graphs, the other compiles for 25 s where 15 s without progress end a group; the runtime's meeting begins after
    both have them, with ports outside the kernel's range."""
    group = {**SMALL["group"], "load_s": 15}
    options = {"device": "neuron", "tensor_parallel": 2, "nodes": 2, "instance": "cores:1", "group": group}
    assert tokens(wide, Nodes(nodes), **options) == want
    cold = Nodes(nodes, NEURON_COMPILE_CACHE_URL=str(nodes / "cold"), STANDIN_COMPILE_S="5")
    assert tokens(wide, cold, **options) == want
    assert len(list((nodes / "cold").glob("*/graph.neff"))) >= 5


@pytest.mark.slow
def test_sequence_parallel_in_one_process(cold: Path, wide: Path, want: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is data: a rank's share of T is cut by a collective. The graphs are others than without."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-3")
    assert tokens(wide, device="neuron", tensor_parallel=4, sequence_parallel=True) == want
    assert tokens(wide, device="neuron", tensor_parallel=4) == want
    assert len([p for p in (cold / "cache").rglob("neuron_config.json")]) == 2


def test_what_compile_writes_serves_every_stage(nodes: Path, wide: Path, want: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """`rayneuron compile --out` of two stages of two ranks: a folder a stage, loaded by a group that may build nothing."""
    from rayneuron.compiling import compile_ahead
    from rayneuron.errors import ConfigError

    said: list[str] = []
    options = {"device": "neuron", "tensor_parallel": 2, "pipeline_parallel": 2, "nodes": 2, "instance": "cores:2"}
    config = parse({"model": {"path": str(wide)}, **SMALL, **options})
    out = compile_ahead(config, nodes / "out", said.append, lambda done, total: None)
    assert sorted(p.name for p in out.iterdir()) == ["stage0", "stage1"]
    listed = "\n".join(said)
    assert "stage 0 of 2" in listed and "b2_t1_l64_hidden_all" in listed and "b2_t1_l64_sampled_logits_last" in listed
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(nodes / "empty"))
    assert tokens(wide, Nodes(nodes), compile={"artifact": str(out), "required": True}, **options) == want
    kept = [len(list((nodes / "empty").rglob(name))) for name in ("manifest.json", "profile.json")]
    assert kept[0] == kept[1] > 0, "step times, and no graph"
    with pytest.raises(ConfigError, match="tp_degree is 2 there, 1 here"):
        tokens(wide, Nodes(nodes), compile={"artifact": str(out)}, **(options | {"tensor_parallel": 1}))


def test_neuron_compat_in_a_group(nodes: Path, wide: Path, want: list[list[int]]) -> None:
    """NxD's sampling rule on the last of two stages draws what one process on the CPU draws by it."""
    compat = {"on_device_sampling": {"neuron_compat": True, "global_topk": 8}}
    alone = tokens(wide, **compat)
    assert tokens(wide, Nodes(nodes), device="neuron", pipeline_parallel=2, nodes=2, instance="cores:1", **compat) == alone != want
