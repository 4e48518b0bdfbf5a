"""Groups of real processes: token for token the single process; every fault named and in time; nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayneuron import LLM, SamplingParams, loading
from rayneuron.config import parse
from rayneuron.engine.profile import measure
from rayneuron.errors import CheckpointError, ConfigError, RayNeuronError, WorkerLost
from rayneuron.group.children import Children
from rayneuron.group.group import Group
from rayneuron.models.config_json import read_config
from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger
from rayneuron.processes import process_started
from tests.models import published
from tests.serve.scripted import PATIENCE_S, eventually

PROMPTS = [[5, 6, 7, 8] * 5, [9, 8, 7], [3] * 50, [4, 5], [100, 200, 300] * 12, [17]]
SMALL: dict[str, Any] = {
    "dtype": "fp32", "max_model_len": 128, "max_num_seqs": 4, "threads": 1, "prefill_chunk_tokens": 32,
    "buckets": {"batch": [2, 4], "token_generation": [128], "context_encoding": [32]},
}  # fmt: skip
PATIENT: dict[str, Any] = {"start_s": 120, "load_s": 120, "step_s": 60, "cores_s": 5}
TOLD_S = PATIENT["step_s"] / 2  # told of an end, where nobody waits for the deadline; at once where the machine is quiet


def children() -> set[int]:
    """Living children of this process, zombies aside."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue  # a thread that ended meanwhile
        found.update(int(pid) for pid in pids if process_started(int(pid)) is not None)
    return found


def descriptors() -> set[str]:
    """Of shared memory of ours, those of this process."""
    held = [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    return {fd for fd in held if "memfd:rayneuron" in os.readlink(f"/proc/self/fd/{fd}")}


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child, no shared memory, no descriptor and no held core may outlive a test."""
    monkeypatch.setenv("RAYNEURON_LEDGER", str(tmp_path / "cores"))
    before, shared, maps = children(), set(os.listdir("/dev/shm")), descriptors()
    yield
    assert children() <= before
    assert set(os.listdir("/dev/shm")) <= shared
    assert descriptors() <= maps
    for node in (tmp_path / "cores").glob("*"):
        # A process whose first thread has ended may keep its locks until the last of its threads has.
        eventually(lambda node=node: Ledger(node, instance("cores:8")).free() == set(range(8)), PATIENCE_S)  # type: ignore[misc]


def answers(llm: LLM, **params: Any) -> list[list[int]]:
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 10, **params})
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, wanted)]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, list[list[int]]]:
    """What one process says: greedily, with sampling, and with penalties that need the logits on the host."""
    with LLM(tiny, enable_prefix_caching=False, **SMALL) as llm:
        return {name: answers(llm, **params) for name, params in KINDS.items()}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7, "top_k": 20},
    "penalties": {"repetition_penalty": 1.3, "max_tokens": 6},
}
SHAPES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp2 sequence parallel": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp4": {"tensor_parallel": 4},
    "tp4 flash decoding": {"tensor_parallel": 4, "shard_over_sequence": True},
    "pp2": {"pipeline_parallel": 2},
    "pp2 micro-batches": {"pipeline_parallel": 2, "micro_batches": 3},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True, "micro_batches": 2},
}


# What the plain forms do is done by the other tests of this file too.
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in ("tp2", "tp4", "pp2") else ()) for name in SHAPES])
def test_tokens_are_those_of_one_process(name: str, tiny: Path, alone: dict[str, list[list[int]]]) -> None:
    """With a prefix cache, which the second and third kinds find filled: only worker 0 knows of it, the others are sent tables."""
    with LLM(tiny, block_size=16, **SMALL, **SHAPES[name], group=PATIENT) as llm:
        group = llm.engine.runner
        assert isinstance(group, Group)
        assert len(children()) == len(group.layout.workers) - 1
        for kind, params in KINDS.items():
            assert answers(llm, **params) == alone[kind], kind
        found = measure(group, llm.engine.vocab)  # as a first start does; the KV of before stays as it is
        assert min(ms for *_, ms in (*found.decode, *found.prefill)) > 0
        again = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=10))
        assert [r.num_cached_tokens for r in again] == [(len(p) - (len(p) % 16 == 0)) // 16 * 16 for p in PROMPTS]
        assert [list(r.outputs[0].token_ids) for r in again] == alone["greedy"]
        assert group.lost is None and group.refused == 0


@pytest.mark.parametrize("method", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa", "eagle")), "eagle3"])
def test_heads_on_two_ranks(tiny: Path, tmp_path: Path, method: str) -> None:
    """Cut as the model is, they draft what they draft on one, and no token changes."""
    make = {"medusa": published.medusa, "eagle": published.eagle, "eagle3": partial(published.eagle3, known=300)}[method]
    folder = published.write(tmp_path, *make(read_config(tiny)))
    warm = {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.2}
    kinds = [SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **more}) for more in ({"logprobs": 2}, warm)]

    def told(**shape: Any) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """The ids; and how many drafts of a row were tried and came true."""
        tried: list[tuple[int, int]] = []
        with LLM(tiny, **SMALL, **shape) as llm:
            step = llm.engine.step
            llm.engine.step = lambda: (step(), tried.extend(llm.engine.info.drafts))[0]  # type: ignore[method-assign]
            made = [r.outputs[0] for params in kinds for r in llm.generate(PROMPTS, params)]
        return [list(o.token_ids) for o in made], tried

    said = {"method": method, "model": str(folder), "adaptive": False, "num_speculative_tokens": 3}
    wanted, none = told(speculative_config=False)
    alone, two = told(speculative_config=said), told(speculative_config=said, tensor_parallel=2, group=PATIENT)
    assert wanted == alone[0] == two[0] and not none
    assert alone[1] == two[1] and sum(n for n, _ in two[1]) > 50


@pytest.mark.parametrize("drafting", [{"prompt_lookup_min": 1}, {"method": "draft_model", "quantization": "int8"}], ids=["echo", "model"])
def test_drafts_on_two_ranks(tiny: Path, drafting: dict[str, Any]) -> None:
    """Every rank verifies what worker 0 has drafted, or a draft model cut as the model is: as one process without drafts, logprobs too, in
    fewer steps."""
    kinds: list[dict[str, Any]] = [{"logprobs": 2}, {"temperature": 0.9, "seed": 7, "logprobs": 2}]

    def told(llm: LLM) -> tuple[list[list[int]], list[float], int]:
        made = [r.outputs[0] for p in kinds for r in llm.generate(PROMPTS, SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **p}))]
        logprobs = [line[token].logprob for o in made for token, line in zip(o.token_ids, o.logprobs or (), strict=True)]
        return [list(o.token_ids) for o in made], logprobs, llm.engine.steps

    with LLM(tiny, speculative_config=False, **SMALL) as llm:
        wanted, wanted_logprobs, plain_steps = told(llm)
    drafting = {**drafting, "adaptive": False, "num_speculative_tokens": 3}
    with LLM(tiny, tensor_parallel=2, speculative_config=drafting, **SMALL, group=PATIENT) as llm:
        found, logprobs, steps = told(llm)
    assert found == wanted and steps < plain_steps
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


def test_scores_and_copies_of_prompts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt logprobs (every logit of a chunk comes back from the last stage) and n > 1 (KV rows copied on every rank); and all of it by
    sockets, as between hosts, where nobody can write a board."""
    monkeypatch.setattr("rayneuron.group.board.shared_memory", lambda: None)
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=5, logprobs=2, prompt_logprobs=1)

    def ask(**shape: Any) -> list[Any]:
        with LLM(tiny, **SMALL, **shape) as llm:
            (result,) = llm.generate([PROMPTS[0]], params)
            scores = [
                round(list(entry.values())[0].logprob, 4) if isinstance(entry, dict) else entry for entry in (result.prompt_logprobs or [])
            ]
            return [[list(o.token_ids) for o in result.outputs], len(scores)]

    assert ask() == ask(pipeline_parallel=2, group=PATIENT)


def test_the_demo_models_heads_need_the_padding_plan(tmp_path: Path) -> None:
    """9 query and 3 key/value heads as in SmolLM2, at TP 2, against transformers."""
    import torch
    import transformers as tf

    torch.manual_seed(0)
    small = tf.LlamaConfig(
        vocab_size=512, hidden_size=72, intermediate_size=96, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(small).eval().float()
    model.save_pretrained(tmp_path / "model")
    from rayneuron import demo

    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((demo.random("tiny", dtype="fp32") / file).read_bytes())
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    with LLM(tmp_path / "model", **SMALL, tensor_parallel=2, group=PATIENT) as llm:
        out = llm.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
        assert list(out[0].outputs[0].token_ids) == expected


def test_counted_cores_are_held_while_the_group_lives(tiny: Path, tmp_path: Path) -> None:
    node = Ledger(tmp_path / "cores" / "127.0.0.1", instance("cores:8"))
    with LLM(tiny, **SMALL, tensor_parallel=2, pipeline_parallel=2, instance="cores:8", group=PATIENT) as llm:
        group = llm.engine.runner
        assert isinstance(group, Group)
        pids = [os.getpid(), *(member.hello.pid for member in group.members)]
        held = {h.pid: h.cores for h in node.holders() if h.deployment == llm.config.model.served_name}
        assert held.keys() == {pids[0], pids[2]} and held[pids[0]] == group.cores  # rank 0 of each stage, for both of its ranks
        assert set(held.values()) == {(0, 1), (2, 3)}
        with pytest.raises(RayNeuronError, match=r"wants 4 of the 8 cores.*held: 0-1 by pid"):
            LLM(tiny, **SMALL, tensor_parallel=4, pipeline_parallel=2, instance="cores:8", group=PATIENT | {"cores_s": 0})
    assert node.free() == set(range(8))


def test_refused_before_a_process_starts(tiny: Path) -> None:
    for shape, says in (
        ({"pipeline_parallel": 3}, "pipeline_parallel: 2"),
        ({"tensor_parallel": 64}, "attention heads"),
        ({"tensor_parallel": 3, "instance": "inf2.xlarge"}, "tensor_parallel: 2"),
    ):
        with pytest.raises(ConfigError, match=says):
            loading.open_engine(parse({"model": {"path": str(tiny)}, **SMALL, **shape}))


def test_a_worker_that_cannot_load_says_why(tiny: Path, tmp_path: Path) -> None:
    """Its file is gone when its turn comes; the message names the worker and the cause, and the kind of error is kept."""
    import shutil

    model = shutil.copytree(tiny, tmp_path / "model")
    config = parse({"model": {"path": str(model)}, **SMALL, "tensor_parallel": 2, "group": PATIENT})
    with pytest.raises((CheckpointError, WorkerLost)) as caught:
        loading.open_engine(Breaking(config, lambda: [file.unlink() for file in model.glob("*.safetensors")]).config)
    assert "worker 1" in str(caught.value) or "safetensors" in str(caught.value)


class Breaking:
    """Breaks something on the way."""

    def __init__(self, config: Any, harm: Callable[[], Any]) -> None:
        harm()
        self.config = config


class Watched(Children):
    """Children that a test may harm at a chosen moment."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def start(self, invitations: Any, nodes: Any) -> None:
        super().start(invitations, nodes)
        if self.at == "rendezvous":
            os.kill(self.pids[1], signal.SIGKILL)


STARTING = [("rendezvous", "tp2"), ("load", "pp2"), ("warm", "tp2 pp2")]
ALL_STARTING = [*STARTING, *(pytest.param(moment, "tp2 pp2", marks=pytest.mark.slow) for moment, _ in STARTING[:2])]


@pytest.mark.parametrize(("moment", "shape"), ALL_STARTING)
def test_a_rank_killed_while_starting(moment: str, shape: str, tiny: Path) -> None:  # BR-15
    processes = Watched(moment)
    config = parse({"model": {"path": str(tiny)}, **SMALL, **SHAPES[shape], "group": PATIENT})
    victim = 2 if shape == "tp2 pp2" and moment != "rendezvous" else 1
    killed = 0.0

    def harm(stage: str, done: int, total: int) -> None:
        nonlocal killed
        if not killed and stage == {"load": "weights", "warm": "graphs"}.get(moment):
            os.kill(processes.pids[victim], signal.SIGKILL)
            killed = time.monotonic()

    with pytest.raises(WorkerLost, match=rf"worker {victim}, rank") as caught:
        loading.open_engine(config, harm, processes=processes)
    if killed:
        assert time.monotonic() - killed < TOLD_S, "told, and everybody has ended"
    assert "gone" in str(caught.value) or "signal 9" in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "victim", "how"),
    [
        ("pp2", 1, signal.SIGTERM),
        ("tp2 pp2", 2, signal.SIGKILL),
        pytest.param("tp2", 1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("tp2", 1, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("pp2", 1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("tp2 pp2", 2, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_generating(shape: str, victim: int, how: signal.Signals, tiny: Path) -> None:
    """Every stream ends with an error that comes at once; afterwards nothing runs and nothing is left."""
    lost: list[str] = []
    config = parse({"model": {"path": str(tiny)}, **SMALL, **SHAPES[shape], "group": PATIENT})
    processes = Children()
    opened = loading.open_engine(config, processes=processes, on_lost=lost.append)
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.types import Request

    ended, streaming, errors = threading.Event(), threading.Event(), []

    def deliver(deltas: list[Any]) -> None:
        streaming.set()
        errors.extend(d.error for d in deltas if d.error)
        if errors:
            ended.set()

    loop = EngineLoop(opened.engine, deliver)
    for i, prompt in enumerate(PROMPTS[:3]):
        loop.submit(Request(id=str(i), prompt_ids=prompt, params=SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)))
    assert streaming.wait(PATIENCE_S)
    pids = dict(processes.pids)
    os.kill(pids[victim], how)
    killed = time.monotonic()
    assert ended.wait(PATIENCE_S)
    took = time.monotonic() - killed
    assert took < TOLD_S
    assert f"worker {victim}," in errors[0] and str(pids[victim]) in errors[0], errors
    loop.close()
    assert len(errors) == 3 and not loop.alive
    eventually(lambda: bool(lost), PATIENCE_S)
    assert len(lost) == 1
    assert not set(pids.values()) & children()


def test_a_rank_killed_while_nobody_asks(tiny: Path) -> None:
    lost = threading.Event()
    config = parse({"model": {"path": str(tiny)}, **SMALL, "tensor_parallel": 2, "group": PATIENT})
    processes = Children()
    opened = loading.open_engine(config, processes=processes, on_lost=lambda reason: lost.set())
    os.kill(processes.pids[1], signal.SIGKILL)
    assert lost.wait(PATIENCE_S)
    group = opened.engine.runner
    assert isinstance(group, Group) and "worker 1, rank 1 of stage 0" in (group.lost or "")
    opened.engine.close()


def test_a_stopped_rank_is_named_at_the_deadline(tiny: Path) -> None:
    """Not dead, only silent (SIGSTOP): the step's deadline ends the group and says who."""
    with LLM(tiny, **SMALL, tensor_parallel=2, group=PATIENT | {"step_s": 3}) as llm:
        group = llm.engine.runner
        assert isinstance(group, Group)
        os.kill(group.members[0].hello.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RayNeuronError, match=r"rank 1 .*within 3 s"):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4))
        assert 3 <= time.monotonic() - began < TOLD_S


@pytest.mark.slow  # test_faults.py kills one at several stages
def test_workers_end_with_their_leader(tiny: Path) -> None:
    """SIGKILL of the process that owns the group: nobody is left, and its cores are free."""
    import subprocess
    import sys

    script = f"""
import os, time
from rayneuron import LLM
llm = LLM({str(tiny)!r}, **{SMALL!r}, tensor_parallel=2, instance="cores:8", group={PATIENT!r})
print(*(member.hello.pid for member in llm.engine.runner.members), flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root, env=environment)
    worker = int(owner.stdout.readline())  # type: ignore[union-attr]
    started = process_started(worker)
    assert started is not None
    owner.kill()
    owner.wait()
    eventually(lambda: process_started(worker) != started, PATIENCE_S, lambda: "the worker outlived its leader")


def test_what_the_c_library_reads_is_there_when_a_worker_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cores are counted, and as the operator says where he says something; `settings.export` would come too late for it."""
    started: list[dict[str, str]] = []

    def popen(command: Any, env: dict[str, str], **more: Any) -> Any:
        started.append(env)
        raise ConfigError("enough")

    monkeypatch.setattr("rayneuron.group.children.subprocess.Popen", popen)
    for name, said in (("cores:2", None), ("cores:2", "7"), (None, None)):
        monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
        if said is not None:
            monkeypatch.setenv("MALLOC_ARENA_MAX", said)
        config = parse({"model": {"path": str(tiny)}, **SMALL, "tensor_parallel": 2, "instance": name})
        with pytest.raises(ConfigError, match="enough"):
            loading.open_engine(config)
    assert [environment.get("MALLOC_ARENA_MAX") for environment in started] == ["64", "7", None]
