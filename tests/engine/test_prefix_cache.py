"""The prefix cache end to end in one process: what is computed, what is found, and the bits of what comes out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rayneuron import LLM, SamplingParams
from rayneuron.engine.engine import Engine
from rayneuron.types import Request, TokenDelta
from tests.engine.test_fuzz import build

SIZE = 16


def ask(name: str, ids: list[int], new: int = 1, salt: str = "", **params: Any) -> Request:
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": new} | params
    return Request(id=name, prompt_ids=ids, params=SamplingParams(**params), cache_salt=salt)


class Watched:
    """An engine, and what its steps have computed."""

    def __init__(self, path: Path, rows: int = 4, cached: bool = True, **words: Any) -> None:
        self.engine: Engine = build(path, rows, block=words.pop("block", SIZE), cached=cached, **words)
        self.steps: list[tuple[str, int, int]] = []  # kind, rows, tokens

    def run(self, *requests: Request) -> dict[str, list[TokenDelta]]:
        for request in requests:
            self.engine.add(request)
        self.steps.clear()
        out: dict[str, list[TokenDelta]] = {}
        while self.engine.has_work:
            before = self.engine.steps
            for delta in self.engine.step():
                out.setdefault(delta.request_id, []).append(delta)
            if self.engine.steps > before:
                self.steps.append((self.engine.info.tag, self.engine.info.rows, self.engine.info.tokens))
            self.engine.check_ledger()
        return out

    @property
    def computed(self) -> int:
        return sum(tokens for _, _, tokens in self.steps)


def words(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(12, 512) for _ in range(count)]


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_computed_at_the_edges_of_blocks(tiny: Path, length: int, ahead: bool) -> None:
    """Nothing known, all of it known, half of it known. All that is known and ends with a block costs one token, in a decode step."""
    watched, ids = Watched(tiny, ahead=ahead), words(length)
    first = watched.run(ask("a", ids))
    assert watched.computed == length and first["a"][0].cached_tokens == 0
    again = watched.run(ask("b", ids))
    known = min(length // SIZE * SIZE, length - 1)
    assert watched.computed == length - known and again["b"][0].cached_tokens == known
    assert again["b"][0].token_ids == first["a"][0].token_ids
    if length % SIZE == 0:
        assert watched.steps == [("decode", 1, 1)]
    half = ids[: length // 2] + words(length - length // 2, seed=1)
    third = watched.run(ask("c", half))
    assert watched.computed == length - length // 2 // SIZE * SIZE
    assert third["c"][0].token_ids == Watched(tiny, cached=False).run(ask("c", half))["c"][0].token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_of_a_block_that_begins_alike_whole_parts_are_copied(tiny: Path, ahead: bool) -> None:
    """A prompt that leaves another in the middle of a block computes what is new, and at most 15 tokens that are not."""
    watched, ids = Watched(tiny, block=64, length=256, ahead=ahead), words(96 + 64)
    watched.run(ask("first", ids))
    for alike, found in [(64 + 47, 64 + 32), (64 + 48, 64 + 48), (15, 0), (16, 16), (64 + 63, 64 + 48)]:
        prompt = ids[:alike] + words(150 - alike, seed=alike)
        told = watched.run(ask(str(alike), prompt, new=4))[str(alike)]
        assert told[0].cached_tokens == found and sum(n for kind, _, n in watched.steps if kind == "prefill") == 150 - found
        plain = Watched(tiny, block=64, length=256, cached=False).run(ask("plain", prompt, new=4))["plain"]
        assert [d.token_ids for d in told] == [d.token_ids for d in plain]
    salted = watched.run(ask("salted", ids[:100], salt="mine"))["salted"]
    assert salted[0].cached_tokens == 0


def test_what_was_generated_is_known_too(tiny: Path) -> None:
    """The next turn of a conversation computes what the client has added, and the block that was not full."""
    watched = Watched(tiny)
    turn = words(20)
    for name in "abc":
        deltas = watched.run(ask(name, turn, new=9))[name]
        reply = [t for d in deltas for t in d.token_ids]
        had = len(turn) + len(reply) - 1  # the last token of a reply is never computed
        turn = turn + reply + words(3, seed=ord(name))
        found = watched.run(ask(name + "x", turn))[name + "x"][0].cached_tokens
        assert found == had // SIZE * SIZE


@pytest.mark.parametrize("ahead", [False, True])
def test_who_goes_on_where_another_ended_finds_the_block_it_had_filled_in_part(tiny: Path, ahead: bool) -> None:
    """The next turn of a conversation, and another one from the middle of the last; nobody else, and nobody once it is forgotten."""
    watched = Watched(tiny, block=64, length=512, ahead=ahead)
    plain = Watched(tiny, block=64, length=512, cached=False)
    turn = words(100)
    for name in "abcdef":
        reply = [t for d in watched.run(ask(name, turn, new=13))[name] for t in d.token_ids]
        had = len(turn) + len(reply) - 1  # the last token of a reply is never computed
        branch = [*turn, *reply][: had // 64 * 64 + 20] + words(30, seed=1 + ord(name))
        turn = turn + reply + words(21, seed=ord(name))
        for prompt, salt, found in ((turn, name, 0), (branch, "", had // 64 * 64 + 16 * (had % 64 >= 16)), (turn, "", had // 16 * 16)):
            told = watched.run(ask(name + "x", prompt, new=4, salt=salt))[name + "x"]
            assert told[0].cached_tokens == found
            assert [t for d in told for t in d.token_ids] == [t for d in plain.run(ask("p", prompt, new=4))["p"] for t in d.token_ids]
    assert all(watched.engine.scheduler.blocks.hashes()), "nobody is told of what has no name"
    watched.engine.scheduler.blocks.reset()
    assert watched.run(ask("z", turn))["z"][0].cached_tokens == 0


def test_cold_requests_of_one_prefix_compute_it_once(tiny: Path) -> None:
    """16 at once that share 1,024 tokens and have 32 of their own: the first computes for all, and the others compute their own."""
    watched, shared = Watched(tiny, rows=16, block=64, chunk=512, length=1120), words(1024)
    out = watched.run(*(ask(str(i), shared + words(32, seed=1 + i)) for i in range(16)))
    assert watched.computed <= 1.1 * (1024 + 16 * 32)
    assert sorted(d[0].cached_tokens for d in out.values()) == [0] + [1024] * 15


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [2 * SIZE + 5, SIZE + 5])
def test_equal_prompts_of_one_moment_are_computed_once(tiny: Path, ahead: bool, length: int) -> None:
    """Also where a step could hold both, as it could the shorter ones: what one of them computes, the other waits for."""
    watched, ids = Watched(tiny, ahead=ahead, chunk=64), words(length)
    alone = Watched(tiny, cached=False).run(ask("a", ids, new=6))["a"]
    out = watched.run(ask("a", ids, new=6), ask("b", ids, new=6))
    assert [d.token_ids for d in out["a"]] == [d.token_ids for d in out["b"]] == [d.token_ids for d in alone]
    prefill = sum(tokens for kind, _, tokens in watched.steps if kind == "prefill")
    assert prefill == len(ids) + 5, "the last piece is each its own"


def test_choices_share_their_prompt_and_nobody_else_s_tokens(tiny: Path) -> None:
    watched, ids = Watched(tiny), words(2 * SIZE + 5)
    request = ask("a", ids, new=SIZE, n=4, temperature=1.0, seed=5)
    cold = watched.run(request)["a"]
    prompts = sum(tokens for kind, _, tokens in watched.steps if kind == "prefill")
    assert prompts == len(ids) and all(d.cached_tokens == 0 for d in cold), "what choices share is not from the cache"
    warm = watched.run(ask("b", ids, new=SIZE, n=4, temperature=1.0, seed=5))["b"]
    plain = Watched(tiny, cached=False).run(ask("c", ids, new=SIZE, n=4, temperature=1.0, seed=5))["c"]
    said = [[[d.token_ids for d in deltas if d.index == i] for i in range(4)] for deltas in (cold, warm, plain)]
    assert said[0] == said[1] == said[2] and max(d.cached_tokens for d in warm) == 2 * SIZE


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_at_any_step_leaves_a_sound_store(tiny: Path, ahead: bool) -> None:
    watched, ids = Watched(tiny, ahead=ahead), words(3 * SIZE)
    wanted = [d.token_ids for d in Watched(tiny, cached=False).run(ask("a", ids, new=4))["a"]]
    for after in range(12):
        for name in "xy":
            watched.engine.add(ask(f"{name}{after}", ids[: 20 + after] + words(20, seed=after), new=4, n=2, temperature=1.0, seed=1))
        for _ in range(after):
            watched.engine.step()
        watched.engine.abort(f"x{after}")
        watched.engine.check_ledger()
        out = watched.run(ask(f"a{after}", ids, new=4))
        assert [d.token_ids for d in out[f"a{after}"]] == wanted
    snapshot = watched.engine.snapshot()
    assert snapshot.blocks_free + snapshot.blocks_cached == snapshot.blocks_total and snapshot.kv_tokens_used == 0


def test_nothing_is_shared_across_salts(tiny: Path) -> None:
    watched, ids = Watched(tiny), words(2 * SIZE)
    watched.run(ask("a", ids))
    for i, request in enumerate((ask("b", ids, salt="x"), ask("d", ids, salt="y"))):
        assert watched.run(request)["bd"[i]][0].cached_tokens == 0
    assert watched.run(ask("e", ids, salt="x"))["e"][0].cached_tokens == 2 * SIZE - 1


def test_after_a_reset_nothing_is_found_and_who_runs_goes_on(tiny: Path) -> None:
    watched, ids = Watched(tiny), words(2 * SIZE)
    wanted = [d.token_ids for d in Watched(tiny, cached=False).run(ask("a", ids, new=40))["a"]]
    watched.run(ask("first", ids))
    watched.engine.add(ask("a", ids, new=40))
    deltas = [d for _ in range(5) for d in watched.engine.step()]
    blocks = watched.engine.scheduler.blocks
    assert blocks.reset() == 2 and blocks.news().held == []
    deltas += watched.run(ask("b", ids))["a"]
    assert [d.token_ids for d in deltas] == wanted
    assert len(blocks.hashes()) == 2, "what was begun before is not built upon: the second prompt alone is known"
    assert watched.run(ask("c", ids))["c"][0].cached_tokens == 2 * SIZE - 1


def test_who_wants_the_prompt_s_logprobs_computes_it_and_leaves_it_to_others(tiny: Path) -> None:
    watched, ids = Watched(tiny), words(2 * SIZE + 3)
    for name in "ab":
        deltas = watched.run(ask(name, ids, prompt_logprobs=1))[name]
        assert watched.computed == len(ids) and deltas[0].cached_tokens == 0 and len(deltas[0].prompt_logprobs or ()) == len(ids)
    assert watched.run(ask("c", ids))["c"][0].cached_tokens == 2 * SIZE


def test_who_was_preempted_comes_back_through_the_cache(tiny: Path) -> None:
    """An urgent request takes the only row: what the other one had computed and nobody needed the room of is still there."""
    watched, ids = Watched(tiny, rows=1), words(2 * SIZE)
    wanted = [d.token_ids for d in Watched(tiny, cached=False).run(ask("a", ids, new=30))["a"]]
    watched.engine.add(ask("a", ids, new=30))
    deltas = []
    while len(deltas) < 20:
        deltas += watched.engine.step()
    urgent = ask("b", words(SIZE, seed=3))
    urgent.priority = -1
    out = watched.run(urgent)
    assert out["a"][-1].preemptions == 1 and [d.token_ids for d in deltas + out["a"]] == wanted
    again = 2 * SIZE + 20 - 1 - (2 * SIZE + 20 - 1) // SIZE * SIZE  # of what it had, the block that was not full
    assert sum(tokens for kind, _, tokens in watched.steps if kind == "prefill") == SIZE + again + 1


OPTIONS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 3, "prefill_chunk_tokens": 64, "threads": 1}


def said(llm: LLM, rounds: int = 2) -> list[Any]:
    """Tokens and the exact probabilities beside them, of prompts of one family, several times over."""
    shared = words(260)
    pieces = ((127, 0), (128, 0), (129, 0), (200, 9), (256, 3), (64, 5))
    prompts = [{"prompt_token_ids": shared[:n] + words(more, seed=n)} for n, more in pieces]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=3, logprobs=3, ignore_eos=True)
    results = [[(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)] for _ in range(rounds)]
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("how", [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "quantization": "int8"}], ids=str)
def test_bits_are_those_without_a_cache(tiny: Path, how: dict[str, Any]) -> None:
    """Of every logit: whoever computed a prefix, in whatever chunks and beside whomever, it is the same; blocks of any size."""
    with LLM(tiny, enable_prefix_caching=False, **how, **OPTIONS) as llm:
        if llm.engine.runner.device.kernels is None:
            pytest.skip("torch's own products depend on the batch")
        wanted = said(llm, rounds=1)
    for block in (16, 32, 64, 128):
        with LLM(tiny, block_size=block, **how, **OPTIONS) as llm:
            assert llm.engine.scheduler.caching
            assert said(llm) == wanted
            assert llm.engine.snapshot().blocks_cached > 0


@pytest.mark.parametrize("how", [{"kv_dtype": "f8e4m3"}, {"kv_dtype": "f8e4m3", "compile": {"async_mode": True}}], ids=str)
def test_small_kv_says_the_same(tiny: Path, how: dict[str, Any]) -> None:
    """Through torch's own attention: greedy text is the same, as everywhere else it promises."""
    prompts = [{"prompt_token_ids": words(n)} for n in (100, 130, 128, 40)]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    told = []
    for caching in (False, True):
        with LLM(tiny, dtype="fp32", enable_prefix_caching=caching, block_size=32, **how, **OPTIONS) as llm:
            told += [[o.outputs[0].token_ids for o in llm.generate(prompts, greedy)] for _ in range(2)]
            assert (llm.engine.snapshot().blocks_cached > 0) is caching
    assert told[0] == told[1] == told[2] == told[3]
