"""Prompts computed by one engine and gone on with by another: the text is that of the request alone, the KV that of an own prefill."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from msgspec.structs import replace

from rayneuron.engine.speculation.drafting import look_up
from rayneuron.structured import Grammars
from rayneuron.types import Request, SamplingParams
from tests.engine import test_draft_model, test_grammar, test_speculation
from tests.engine.test_fuzz import draw
from tests.engine.test_fuzz import solo as solo
from tests.engine.test_speculation import TRIES
from tests.serve.scripted import PATIENCE_S, eventually
from tests.transfer.pair import Decoding, Pair, Prefilling, cpu, held, open_engine

SIZE = 16
grammars = test_grammar.grammars


WAYS = [
    (0, "shared", False, False),
    (1, "sockets", True, False),
    (2, "shared", True, True),
    (3, "sockets", False, True),
    (4, "auto", True, True),
]


@pytest.mark.parametrize(("seed", "way", "cached", "ahead"), WAYS)
def test_every_request_through_both_pools_equals_its_solo_run(tiny, solo, seed, way, cached, ahead):  # noqa: F811
    """Whatever the generator of the engine's fuzz draws: seeds, choices, logprobs, penalties, stops; with and without a prefix cache on
    both sides; not one prompt token is computed where it is decoded unless its KV was lost, or half of the blocks waited."""
    rng = random.Random(seed)
    families = [[rng.randrange(12, 512) for _ in range(64)] for _ in range(3)] if cached else None
    requests = [draw(rng, i, families) for i in range(40)]
    with ExitStack() as stack:
        p = open_engine(tiny, rows=3, kv_tokens=384, chunk=rng.choice([8, 16, 32]), cached=cached, shared=True, ahead=ahead)
        d = open_engine(tiny, rows=8, chunk=16, cached=cached, ahead=ahead)
        pair = Pair(stack, p, d, way)
        got = pair.run(*requests)
        assert got == {(r.id, i): solo(r, i) for r in requests for i in range(r.params.n)}
        pair.at_baseline()
        local = pair.d.engine.scheduler.preemptions + pair.d.counts["failed"] + pair.d.pulls.prefills["local", "room"]
        assert pair.d.counts["adopted"] > 15 and (local or not pair.d.counts["prefill"]), pair.d.counts
        assert pair.p.offers.counts["committed"] >= pair.d.pulls.counts["adopted"], "what is adopted was committed"


def scripted(plain, right):
    return lambda path, **sizes: test_speculation.build(path, propose=test_speculation.Script(plain, right), **sizes)


DRAFTS = {
    "ngram": lambda plain: lambda path, **sizes: test_speculation.build(path, propose=partial(look_up, 1, 3), **sizes),
    "draft model": lambda plain: lambda path, **sizes: test_draft_model.build(path, path, int8=True, **sizes),
    "forced tokens": lambda plain: lambda path, **sizes: test_speculation.build(path, propose=lambda sequence, most: ((), 1), **sizes),
    "oracle": lambda plain: scripted(plain, lambda: TRIES),
    "liar": lambda plain: scripted(plain, lambda: 0),
}


DRAFTED = [("ngram", "shared", True), ("draft model", "sockets", True), ("forced tokens", "shared", False)]
DRAFTED += [("oracle", "shared", True), ("liar", "sockets", True)]


@pytest.mark.parametrize(("name", "way", "cached"), DRAFTED)
def test_drafts_and_constraints_change_nothing_behind_another_pool(tiny, plain, grammars, name, way, cached):  # noqa: F811
    """Every way to sample, penalties, bans, choices, logprobs, stops and grammars: tokens, logprobs and ends are those of the choice alone,
    without drafts. Only who decodes drafts, and with a draft model that has read nothing of what came from elsewhere."""
    rng = random.Random(name)
    families = [[rng.randrange(12, 512) for _ in range(6)] * 11 for _ in range(3)]
    requests = [test_speculation.draw(rng, i, plain, families) for i in range(20)]
    requests += [replace(request, id=f"g{request.id}") for request in test_grammar.requests(2)]
    with ExitStack() as stack:
        p = open_engine(tiny, rows=3, kv_tokens=384, chunk=16, cached=cached, shared=True)
        d = DRAFTS[name](plain)(tiny, rows=6, block=16, chunk=16, cached=cached)
        drafts, step = [], d.step

        def stepped():
            deltas = step()
            drafts.extend(d.info.drafts)
            return deltas

        d.step = stepped
        pair = Pair(stack, *(test_grammar.constrained(engine, Grammars(grammars._text, 512)) for engine in (p, d)), way)
        pair.run(*requests)
        pair.at_baseline()
        for request in requests:
            for index in range(request.params.n):
                deltas = pair.d.heard.out[request.id, index]
                assert test_speculation.told(deltas) == plain(request, index), request
        assert pair.d.counts["adopted"] > 25 and sum(n for n, _ in drafts) > 50, (pair.d.counts, len(drafts))


@pytest.fixture(scope="module")
def plain(tiny, grammars):  # noqa: F811
    """What one choice is told alone, without drafts."""
    engine, known = test_grammar.constrained(test_speculation.build(tiny, rows=1, chunk=96), grammars), {}

    def given(request: Request, index: int = 0) -> tuple:
        key = tuple(request.prompt_ids), repr(request.params), index
        if key not in known:
            seed = request.params.seed
            params = replace(request.params, n=1, seed=None if seed is None else seed + index)
            asked = Request(id="solo", prompt_ids=list(request.prompt_ids), params=params)
            known[key] = test_speculation.run(engine, [asked])["solo", 0]
        return known[key]

    return given


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(12, 512) for _ in range(length)]


KINDS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]


@pytest.mark.parametrize(("dtype", "quantization"), KINDS, ids=str)
@pytest.mark.parametrize("block", [16, 64])
def test_the_kv_that_arrives_has_the_bits_of_an_own_prefill(tiny, dtype, quantization, block):
    """At every edge of a block; in rows and in panels; over memory and over sockets."""
    lengths = sorted({n for k in (1, 2, 4) for n in (k * SIZE - 1, k * SIZE, k * SIZE + 1) if n <= 80})
    how = {"dtype": dtype, "quantization": quantization, "block": block}
    own = open_engine(tiny, rows=1, chunk=32, **how)
    if cpu(own).kernels is None:
        pytest.skip("torch's own products depend on how a prompt is cut")
    for way in ("shared", "sockets"):
        with ExitStack() as stack:
            pair = Pair(stack, open_engine(tiny, shared=True, chunk=16, **how), open_engine(tiny, rows=12, **how), way)
            requests = [ask(str(n), prompt(n, n), 3) for n in lengths]
            got = pair.run(*requests)
            pair.at_baseline()
            assert pair.d.counts["prefill"] == 0 and pair.d.counts["adopted"] == len(lengths)
        for request in requests:
            n = len(request.prompt_ids)
            own.add(ask("own", request.prompt_ids, 3))
            own.step()
            while own.scheduler.running[0].settled < n:
                own.step()
            wanted = held(own, own.scheduler.running[0].hold.blocks, n)
            alone = [t for delta in drain_on(own) for t in delta.token_ids]
            assert torch.equal(pair.d.kv[request.id].view(torch.uint8), wanted.view(torch.uint8)), n
            assert list(got[request.id, 0][0])[-len(alone) :] == alone


def drain_on(engine):
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


def ask(name: str, ids: list[int], new: int, **params) -> Request:
    return Request(id=name, prompt_ids=ids, params=SamplingParams(**{"max_tokens": new, "temperature": 0.0, "ignore_eos": True} | params))


def test_what_is_known_here_is_not_asked_for(tiny):
    """The second turn of a conversation: only blocks behind the cached ones come."""
    first = prompt(40, 1)
    with ExitStack() as stack:
        pair = Pair(stack, open_engine(tiny, cached=True, shared=True), open_engine(tiny, cached=True))
        said = pair.run(ask("a", first, 8))["a", 0][0]
        before = pair.d.pulls.counts["bytes"]
        second = [*first, *said, *prompt(20, 2)]
        pair.run(ask("b", second, 4))
        each = sum(units[0].nbytes for units in cpu(pair.d.engine).kv_memory().units)  # a block of all layers
        assert before == 3 * each
        assert pair.d.pulls.counts["bytes"] - before == each * (-(-len(second) // SIZE) - (len(first) + 7) // SIZE)
        assert pair.d.heard.out["b", 0][0].cached_tokens >= 32
        pair.run(ask("c", prompt(33, 5), 2))
        pair.run(ask("d", prompt(33, 5), 2))  # all but the last token, whose logits are wanted
        assert pair.d.pulls.prefills == {("remote", "long"): 3, ("local", "cached"): 1}
        pair.at_baseline()


def test_a_first_token_that_ends_the_request_moves_no_kv_for_long(tiny):
    with ExitStack() as stack:
        pair = Pair(stack, open_engine(tiny, shared=True), open_engine(tiny))
        got = pair.run(ask("a", prompt(50, 3), 1), ask("b", prompt(50, 4), 9, stop_token_ids=tuple(range(512))))
        assert [len(tokens) for tokens, _ in got.values()] == [1, 1] and got["a", 0][1] == "length" and got["b", 0][1] == "stop"
        pair.at_baseline()


def test_a_request_that_is_aborted_leaves_nothing_on_either_side(tiny):
    """At any moment: before, while and after its KV comes."""
    rng = random.Random(5)
    with ExitStack() as stack:
        pair = Pair(stack, open_engine(tiny, shared=True), open_engine(tiny))
        for i in range(60):
            pair.d.loop.submit(ask(f"r{i}", prompt(60, i), 9))
            for _ in range(rng.choice([0, 0, 10, 200, 1000])):
                pass
            if rng.random() < 0.7:
                pair.d.loop.abort(f"r{i}")
        pair.d.heard.wait([ask(f"r{i}", [1], 1) for i in range(60)])
        pair.at_baseline()


def test_pools_that_differ_are_refused_and_prompts_stay_local(tiny, caplog):
    with ExitStack() as stack:
        p = Prefilling(open_engine(tiny, block=32, shared=True))
        stack.callback(p.close)
        d = Decoding(open_engine(tiny, block=16))
        stack.callback(d.close)
        d.pulls.meet({"p": p.offers.addresses})
        eventually(lambda: "block: 16 here, 32 there" in caplog.text, PATIENCE_S)
        assert d.pulls.ready == []
        d.loop.submit(ask("a", prompt(40, 1), 3))
        d.heard.wait([ask("a", [1], 1)])
        assert d.counts["prefill"] > 0


def test_who_has_a_prefix_already_is_asked(tiny):
    """Of two that have nothing to do, and that is known by what each says of its cache: what it learns, and what it forgets."""
    first = prompt(64, 1)
    with ExitStack() as stack:
        ps = [Prefilling(open_engine(tiny, cached=True, shared=True)) for _ in range(2)]
        for p in ps:
            stack.callback(p.close)
        before, d = (Decoding(open_engine(tiny, cached=True)) for _ in range(2))
        stack.callback(before.close)
        stack.callback(d.close)
        before.meet(ps[1])
        before.loop.submit(ask("a", first, 2))
        before.heard.wait([ask("a", [1], 1)])
        d.meet(*ps)

        def uncached(name: str) -> int:
            hashes = before.engine.scheduler._hashes(probe)
            return next(queue.uncached for queue in d.pulls._roster.queues(len(second), hashes) if queue.name == name)

        second = [*first, *prompt(20, 2)]
        probe = sequence_of(before, second)
        eventually(lambda: (uncached("0"), uncached("1")) == (84, 20), PATIENCE_S, lambda: (uncached("0"), uncached("1")))
        for i, asked in ((0, 1), (1, 1)):
            d.loop.submit(ask(f"b{i}", [*first, *prompt(20, 3 + i)], 2))
            d.heard.wait([ask(f"b{i}", [1], 1)])
            assert d.counts["adopted"] == i + 1 and sum(ps[0].offers.counts.values()) == 0, asked
        assert d.heard.out["b0", 0][0].cached_tokens == 64, "what was cached there counts as cached"
        ps[1].loop.ask(lambda engine: engine.scheduler.blocks.reset()).result(10)
        eventually(lambda: uncached("1") == 84, PATIENCE_S, lambda: uncached("1"))
        d.loop.submit(ask("c", prompt(70, 9), 2))
        d.heard.wait([ask("c", [1], 1)])
        assert ps[0].offers.counts["committed"] == 1, "nobody has it, so the first is asked"


def test_what_is_too_long_to_be_said_is_computed_here_and_costs_nobody_else_anything(tiny):
    with ExitStack() as stack:
        pair = Pair(stack, open_engine(tiny, shared=True), open_engine(tiny, rows=16))
        long = replace(ask("long", prompt(60, 0), 3), prediction=[500] * 500_000)
        got = pair.run(*(ask(f"r{i}", prompt(60, i), 3) for i in range(3)), long, *(ask(f"r{i}", prompt(60, i), 3) for i in range(3, 6)))
        assert got["long", 0] == got["r0", 0]
        assert (pair.d.counts["adopted"], pair.d.counts["failed"], pair.d.pulls.ready) == (6, 1, ["0"])
        assert pair.d.pulls.fallbacks == {"asked": 1} and pair.p.offers.counts == {"committed": 6}
        asked = sum(map(len, (prompt(60, i) for i in range(7))))
        assert (pair.d.pulls.counts["queries"], pair.d.pulls.counts["hits"]) == (asked, asked - 60)
        assert pair.d.pulls.prefills == {("remote", "long"): 7}
        pair.at_baseline()


def sequence_of(one: Decoding, ids: list[int]):
    """As its scheduler would hash it."""
    from rayneuron.engine.requests import Requests

    return Requests(96, frozenset()).open(ask("probe", ids, 1), 0.0)
