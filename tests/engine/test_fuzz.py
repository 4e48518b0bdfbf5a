"""Solo-equality fuzz: each finished request equals its own run alone, and the ledger returns to its base line."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from rayneuron import devices, models
from rayneuron.devices.base import FOLLOWS
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import Runner
from rayneuron.models import hub, weights
from rayneuron.types import Request, SamplingParams

LENGTH = 96
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64)


def build(
    path,
    rows: int,
    kv_tokens: int | None = None,
    block: int | None = None,
    chunk: int = 16,
    dtype: torch.dtype = torch.float32,
    ahead: bool = False,
    prefix: tuple[int, ...] = (),
    cached: bool = False,
    length: int = LENGTH,
    quantization: str | None = None,
    shared: bool = False,
    fine: bool = False,
) -> Engine:
    """`fine`: the sizes a deployment has by default, else small ones."""
    raw = hub.read_config(path)
    arch = models.architecture(raw)
    made = weights.load(arch, models.family(raw), hub.Checkpoint(path), dtype=dtype, quantization=quantization)
    small = {} if fine else {"smallest": 16, "smallest_context": 4, "scores": 8}
    c = capacity(rows=rows, length=length, chunk=chunk, kv_tokens=kv_tokens, prefix=prefix, block=block, **small)
    device = devices.open("cpu", ahead=devices.Ahead(async_mode=ahead), dtype=dtype, threads=1, shared_kv=shared)
    runner = Runner(arch, device, c)
    assert runner.overlaps is ahead
    runner.load(made)
    runner.warm(lambda *_: None)
    return Engine(runner, vocab=arch.vocab, eos_ids=(7, 11), model="tiny" if cached else None)


@pytest.fixture(scope="module")
def solo(tiny):
    engine = build(tiny, rows=1, chunk=LENGTH)
    known: dict[tuple, tuple] = {}

    def run(request: Request, index: int) -> tuple:
        key = (tuple(request.prompt_ids), msgspec.json.encode(request.params), index)
        if key not in known:
            from msgspec.structs import replace

            seed = request.params.seed
            params = replace(request.params, n=1, seed=None if seed is None else seed + index)
            known[key] = drain(engine, [Request(id="solo", prompt_ids=list(request.prompt_ids), params=params)])["solo", 0]
        return known[key]

    return run


def drain(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], tuple]:
    for request in requests:
        engine.add(request)
    out: dict[tuple[str, int], list] = {}
    while engine.has_work:
        collect(out, engine.step())
    return {k: finished(v) for k, v in out.items()}


def drive(engine: Engine, requests: list[Request], rng: random.Random, aborts: float, before=lambda: None, after=lambda: None):
    """The deltas of every choice, and the requests that were aborted, all of them or their first choice: one in a share `aborts` of steps.
    Requests come a few at a time, the last first; `before` and `after` are called around every step."""
    waiting, out, aborted = list(requests), {}, set()
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            if waiting:
                engine.add(waiting.pop())
        if rng.random() < aborts and engine._requests:
            victim = rng.choice(list(engine._requests))
            engine.abort(victim, rng.choice([None, 0]))
            aborted.add(victim)
        before()
        collect(out, engine.step())
        engine.check_ledger()
        after()
    assert set(out) == {(r.id, i) for r in requests for i in range(r.params.n)}, "every choice ended"
    return out, aborted


def collect(out: dict, deltas) -> None:
    for d in deltas:
        out.setdefault((d.request_id, d.index), []).append(d)


def finished(deltas: list) -> tuple:
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True], "exactly one last delta"
    return tuple(t for d in deltas for t in d.token_ids), deltas[-1].finish_reason


def draw(rng: random.Random, i: int, families: list[list[int]] | None = None) -> Request:
    """`families`: prompts begin with a piece of one of these."""
    prompt = [rng.randrange(12, 512) for _ in range(rng.choice(EDGES))]
    if families is not None:
        prompt = (rng.choice(families)[: rng.choice(EDGES)] + prompt[: rng.choice([0, 0, 1, 9])])[:64]
    most = min(rng.choice([1, 2, 5, 9, 20]), LENGTH - len(prompt))
    kind = rng.randrange(5)
    params: dict = {"max_tokens": most, "temperature": 0.0}
    if kind == 1:
        params = {"max_tokens": most, "temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.randrange(1000)}
        params |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.9}])
        params["n"] = rng.choice([1, 1, 2, 3])
    elif kind == 2:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 2}
    elif kind == 3:
        params |= {"logprobs": 3, "prompt_logprobs": 1, "min_tokens": min(3, most), "logit_bias": {7: 50.0}}
    elif kind == 4:
        params |= {"ignore_eos": True, "stop_token_ids": (rng.randrange(12, 512),)}
    return Request(id=f"r{i}", prompt_ids=prompt, params=SamplingParams(**params), priority=rng.choice([0, 0, 0, -1, 2]))


KINDS = [
    [(seed, False, (), False) for seed in range(8)],
    [(seed, True, (), False) for seed in range(6)],
    [(seed, seed % 2 == 1, (16, 48), False) for seed in range(20, 23)],
    [(seed, seed % 2 == 1, () if seed % 3 else (16, 48), True) for seed in range(30, 42)],
]
WAYS = [pytest.param(*way, marks=() if i < 3 or i % 2 else pytest.mark.slow) for kind in KINDS for i, way in enumerate(kind)]


@pytest.mark.parametrize(("seed", "ahead", "prefix", "cached"), WAYS)
def test_every_finished_request_equals_its_solo_run(tiny, solo, seed, ahead, prefix, cached):
    """With steps begun before the one before has ended, too: stops, aborts, preemption and rows whose token the host decides; with prefix
    buckets; and with a prefix cache, whose blocks never change, whatever is written elsewhere."""
    rng = random.Random(seed)
    rows = rng.choice([2, 3, 5])
    budget = rng.choice([None, 96, 144, 192])  # 96: exactly one full sequence, so that growing sequences preempt each other
    block = rng.choice([16, 16, 32, 64 if cached else None])  # None: one block a row, which never grows
    engine = build(tiny, rows, budget, block, chunk=rng.choice([8, 16, 32]), ahead=ahead, prefix=prefix, cached=cached)
    followed = watch(engine)
    families = [[rng.randrange(12, 512) for _ in range(64)] for _ in range(3)] if cached else None
    requests = [draw(rng, i, families) for i in range(40)]
    guard = Guard(engine) if cached else None
    around = {} if guard is None else {"before": guard.spoil, "after": guard.look}
    by_id = {r.id: r for r in requests}
    out, aborted = drive(engine, requests, rng, 0.04, **around)
    checked = 0
    for (rid, index), deltas in out.items():
        tokens, reason = finished(deltas)
        wanted, wanted_reason = solo(by_id[rid], index)
        scored = [len(d.prompt_logprobs) for d in deltas if d.prompt_logprobs is not None]
        assert scored in ([], [len(by_id[rid].prompt_ids)]), "once, however often the prompt was computed"
        if reason == "abort":
            assert rid in aborted and tokens == wanted[: len(tokens)]
        else:
            assert (tokens, reason) == (wanted, wanted_reason), by_id[rid]
            checked += 1
    assert checked > 20
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_tokens_used, snapshot.slots_free) == (0, 0, 0, rows)
    if budget in (96, 144) and block == 16:
        assert snapshot.preemptions > 0
    assert (sum(followed) > 10) is ahead
    if guard is not None:
        assert guard.known and (block == 64 or sum(deltas[0].cached_tokens for deltas in out.values()) > 100)


class Guard:
    """What a block of one name holds never changes, nor does it depend on who computed it, and when: its bits are those of the first time.

    No step may write one, not even the same again. `spoil` fills what nobody holds and nobody knows, and scratch, with NaN: whoever reads
    it would say so.
    """

    def __init__(self, engine: Engine) -> None:
        self.known: dict[bytes, bytes] = {}
        self._blocks, self._device = engine.scheduler.blocks, engine.runner.device
        self._native = getattr(self._device, "_device", self._device).kernels is not None
        start = self._device.start

        def guarded(shape, batch):
            written = {slot // self._blocks.space.block for slot in batch.slots.flatten().tolist()}
            assert not written & set(self._blocks.registered.hashes), "a step would write a block that others may read"
            return start(shape, batch)

        self._device.start = guarded

    def spoil(self) -> None:
        space = self._blocks.space
        where = [space.scratch, *(self._blocks._free if self._native else ())]
        self._device.kv_write(where, torch.full_like(self._device.kv_read(where), float("nan")))

    def look(self) -> None:
        for digest, block in self._blocks.registered._at.items():
            held = self._device.kv_read([block]).numpy().tobytes()
            assert self.known.setdefault(digest, held) == held, "somebody wrote a shared block"


def watch(engine: Engine) -> list[int]:
    """How many tokens of each batch the device took from its last step."""
    followed: list[int] = []
    start = engine.runner.device.start

    def counted(shape, batch):
        followed.append(int((batch.tokens == FOLLOWS).sum()))
        return start(shape, batch)

    engine.runner.device.start = counted
    return followed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_do_not_depend_on_the_batch(tiny, dtype):
    engine = build(tiny, 4, dtype=dtype)
    if dtype == torch.bfloat16 and engine.runner.device.kernels is None:
        pytest.skip("torch's own bf16 products depend on the batch")
    rng = random.Random(9)
    prompts = [[rng.randrange(12, 512) for _ in range(n)] for n in (5, 17, 40)]
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2, ignore_eos=True)

    def entries(batch: list[list[int]]) -> list[list[float]]:
        for i, p in enumerate(batch):
            engine.add(Request(id=str(i), prompt_ids=p, params=params))
        got: dict[str, list[float]] = {}
        while engine.has_work:
            for d in engine.step():
                mine = got.setdefault(d.request_id, [])
                mine += [e.logprob for e in (d.prompt_logprobs or [])[1:]] + [e.logprob for e in d.logprobs or []]
        return [got[str(i)] for i in range(len(batch))]

    together, alone = entries(prompts), [entries([p])[0] for p in prompts]
    for a, b, p in zip(together, alone, prompts, strict=True):
        assert len(a) == len(p) - 1 + 4
        if engine.runner.device.kernels is not None:
            assert a == b  # bit for bit
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-4


def test_a_deadline_ends_a_request(tiny):
    now = [100.0]
    engine = build(tiny, 2)
    engine._clock = lambda: now[0]
    engine.add(
        Request(id="late", prompt_ids=[20] * 9, params=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), deadline_s=105.0)
    )
    engine.add(Request(id="free", prompt_ids=[20] * 9, params=SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
    out: dict = {}
    collect(out, engine.step())
    now[0] = 106.0
    while engine.has_work:
        collect(out, engine.step())
    assert finished(out["late", 0])[1] == "abort" and "deadline" in out["late", 0][-1].error
    assert finished(out["free", 0])[1] == "length"
    engine.check_ledger()


def test_a_failing_device_ends_every_request_with_an_error(tiny):
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.errors import NotReady

    engine = build(tiny, 2)
    got: list = []
    import threading

    done = threading.Event()

    def deliver(deltas):
        got.extend(deltas)
        if sum(d.finish_reason is not None for d in got) == 3:
            done.set()

    def broken(*_):
        raise RuntimeError("the device is gone")

    engine.runner.device.start = broken
    loop = EngineLoop(engine, deliver)
    for i in range(3):
        loop.submit(Request(id=str(i), prompt_ids=[20, 21], params=SamplingParams(max_tokens=5)))
    assert done.wait(60)
    assert {d.finish_reason for d in got} == {"error"} and all("the device is gone" in d.error for d in got)
    loop.close()
    assert not loop.alive
    with pytest.raises(NotReady, match="the device is gone"):
        loop.submit(Request(id="x", prompt_ids=[20], params=SamplingParams()))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("field", ["top_k", "min_p", "seed", "logit_bias", "logprobs"])
def test_what_cannot_be_laid_out_or_sampled_ends_its_own_choice(tiny, ahead, field):
    """Past every check, by force: a row that pack cannot hold, or that the host cannot sample, in a batch with healthy ones."""
    from msgspec.structs import force_setattr

    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = {"a": [20, 21, 22], "b": [30] * 9}
    alone = drain(build(tiny, 4), [Request(id=k, prompt_ids=v, params=greedy) for k, v in prompts.items()])
    engine = build(tiny, 4, ahead=ahead)
    sampled = SamplingParams(max_tokens=12, temperature=1, n=2, seed=3, ignore_eos=True)
    bad = Request(id="bad", prompt_ids=[40, 41], params=sampled)
    force_setattr(sampled, field, {"top_k": 2**31, "min_p": "x", "seed": None, "logit_bias": {3: "x"}, "logprobs": "x"}[field])
    for name, prompt in prompts.items():
        engine.add(Request(id=name, prompt_ids=prompt, params=greedy))
    try:
        engine.add(bad)
    except Exception:  # as the loop takes it: the request is refused, and nothing of it is left
        assert field == "logit_bias" and not engine.knows("bad")
    out: dict = {}
    while engine.has_work:
        collect(out, engine.step())
        engine.check_ledger()
    assert {k: finished(v) for k, v in out.items() if k[0] != "bad"} == alone
    if field not in ("seed", "logit_bias"):
        last = {k: v[-1] for k, v in out.items() if k[0] == "bad"}
        assert {k: (d.finish_reason, d.fault) for k, d in last.items()} == {("bad", i): ("error", "choice") for i in (0, 1)}
        assert all(d.stamps is not None and "log has the details" in d.error for d in last.values())
    assert engine.snapshot().kv_tokens_used == 0


def test_a_choice_with_nothing_left_ends_with_an_error_and_its_neighbours_go_on(tiny):
    engine = build(tiny, 4)
    forbidden = SamplingParams(max_tokens=5, temperature=1, allowed_token_ids=(50, 51), no_repeat_ngram_size=1, ignore_eos=True)
    out = {}
    for name, params in (("x", forbidden), ("y", SamplingParams(max_tokens=5))):
        engine.add(Request(id=name, prompt_ids=[20], params=params))
    while engine.has_work:
        collect(out, engine.step())
    ids, reason = finished(out["x", 0])
    assert sorted(ids) == [50, 51] and reason == "error" and out["x", 0][-1].fault == "request"
    assert "no token is left" in out["x", 0][-1].error and finished(out["y", 0])[1] in ("length", "stop")


def test_no_step_looks_for_the_compiler(tiny, monkeypatch):
    """Whether there are kernels is known since the load: the first request with logprobs or penalties runs no program in its step."""
    import subprocess

    from rayneuron import config, loading
    from rayneuron.devices.cpu import library

    library.present.cache_clear()
    small = {"model": {"path": str(tiny)}, "dtype": "fp32", "max_model_len": 64, "max_num_seqs": 2, "threads": 1}
    opened = loading.open_engine(config.parse(small))

    def refuse(*command, **_):
        raise AssertionError(f"a step ran {command}")

    monkeypatch.setattr(subprocess, "run", refuse)
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2, repetition_penalty=1.2, top_p=0.99, temperature=1)
    assert drain(opened.engine, [Request(id="a", prompt_ids=[20] * 5, params=params)])["a", 0][1] in ("length", "stop")
    assert library.present.cache_info().misses == 1
    opened.engine.close()
