"""A draft model in the step changes no token, and knows what it would know had it read every text from its beginning."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from rayneuron import demo, devices, models
from rayneuron.config import parse
from rayneuron.engine import draft_step
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import Runner
from rayneuron.engine.speculation.drafting import Chain, Speculation, predicted
from rayneuron.engine.speculation.pace import Pace
from rayneuron.engine.speculation.reading import Readings
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.llm import LLM
from rayneuron.models import hub, quantize, weights
from rayneuron.sources.drafts import draft_model
from rayneuron.types import Profile, Request, SamplingParams
from tests.engine import test_speculation
from tests.engine.test_fuzz import LENGTH
from tests.engine.test_pace import steady
from tests.engine.test_speculation import GREEDY, TRIES, VOCAB, collect, fuzz, run, told

solo = test_speculation.solo
GENEROUS = {"max_model_len": 256, "max_num_seqs": 4, "threads": 1}


def build(
    path, draft: Path, rows: int, *, int8: bool = False, pace: Pace | None = None, limit: int = LENGTH, chunk: int = 16, **sizes
) -> Engine:
    """As `test_speculation.build`, with a draft model in fp32, or in int8."""
    held, archs, dtype = [], [], torch.bfloat16 if int8 else torch.float32
    for folder, kind, how in ((path, torch.float32, None), (draft, dtype, quantize.parse("int8") if int8 else None)):
        raw = hub.read_config(folder)
        archs.append(models.architecture(raw))
        held.append(weights.load(archs[-1], models.family(raw), hub.Checkpoint(folder), dtype=kind, quantization=how))
    cached = sizes.pop("cached", False)
    sizes = {"chunk": chunk, "smallest": 16, "smallest_context": 4, "scores": 8, "verify": 1 + TRIES, "drafts": "model", **sizes}
    c = capacity(rows=rows, length=LENGTH, **sizes)
    device = devices.open("cpu", ahead=devices.Ahead(), dtype=torch.float32, threads=1)
    runner = Runner(archs[0], device, c, partial(draft_step.step, *archs), archs[1])
    runner.load({**held[0], "draft": held[1]})
    runner.warm(lambda *_: None)
    speculation = Speculation(TRIES, partial(predicted, 1, 3), pace, Chain(Readings(c, None), limit, stops=pace is not None))
    return Engine(runner, vocab=archs[0].vocab, eos_ids=(7, 11), model="tiny" if cached else None, speculation=speculation)


@pytest.fixture(scope="module")
def other() -> Path:
    """A model that agrees with the other one in nothing but the vocabulary."""
    return demo.random("tiny", seed=5, dtype="fp32")


@pytest.mark.parametrize("name", ["int8", "other"])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_choice_is_told_what_it_is_told_alone(tiny, other, solo, name, seed):
    """With preemption, aborts, chunks, blocks and a prefix cache."""
    rng = random.Random(100 + seed)
    families = [[rng.randrange(12, VOCAB) for _ in range(6)] * 11 for _ in range(3)]
    sizes = {"kv_tokens": rng.choice([96, 144, None]), "block": 16, "chunk": rng.choice([8, 32]), "cached": seed % 2 == 1}
    engine = build(tiny, other if name == "other" else tiny, rng.choice([2, 3, 5]), int8=name == "int8", **sizes)
    drafts = fuzz(engine, rng, solo, families)
    assert sum(n for n, _ in drafts) > 100
    assert (sum(n for _, n in drafts) > 20) == (name == "int8")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kv_tokens", [None, 128])
def test_a_copy_of_the_model_is_always_right(tiny, solo, cached, kv_tokens):
    """Greedy and sampled, with forks, preemption, chunks, and prefixes that others have read: it would not be, had it missed one id."""
    engine = build(tiny, tiny, 4, block=16, chunk=8, cached=cached, kv_tokens=kv_tokens)
    shared = [20 + i % 7 for i in range(40)]
    requests = [Request(id="greedy", prompt_ids=shared, params=GREEDY)]
    requests += [
        Request(
            id=f"s{i}",
            prompt_ids=[*shared[: 40 - 9 * i], 30 + i],
            params=SamplingParams(max_tokens=20, seed=i, n=1 + i % 3, ignore_eos=True),
        )
        for i in range(4)
    ]
    out: dict = {}
    for turn in range(2):
        for request in requests:
            engine.add(replace(request, id=f"{request.id}{turn}"))
        while engine.has_work:
            collect(out, engine.step())
            engine.check_ledger()
            assert all(accepted == n for n, accepted in engine.info.drafts), engine.info
    for (rid, index), deltas in out.items():
        request = next(r for r in requests if rid[:-1] == r.id)
        assert told(deltas) == solo(request, index)
    assert (engine.scheduler.preemptions > 0) == (kv_tokens is not None)


@pytest.mark.parametrize(("most", "steps"), [(24, 6), (1, 1), (2, 2), (6, 2), (7, 3)])
def test_right_drafts_save_steps(tiny, solo, most, steps):
    """The prompt's step gives a token, each further one five; the prompt is read within the first of those."""
    request = Request(id="a", prompt_ids=[20, 21, 22], params=replace(GREEDY, max_tokens=most))
    engine = build(tiny, tiny, 2)
    assert run(engine, [request])["a", 0] == solo(request)
    assert engine.steps == steps


def test_a_prompt_is_read_once_however_many_share_it(tiny):
    """By the blocks of a prefix that is known, and by choices of one request."""
    engine, prompt, read = build(tiny, tiny, 4, block=16, chunk=32, cached=True), [20 + i % 9 for i in range(48)], []
    plan = engine.scheduler.plan

    def watched():
        made = plan()
        read.extend(work.count for work in (made.fills if made is not None else ()))
        return made

    engine.scheduler.plan = watched
    run(engine, [Request(id="a", prompt_ids=prompt, params=SamplingParams(max_tokens=8, seed=1, ignore_eos=True))])
    assert sum(read) == 49, "in two chunks, between which a token came"
    read.clear()
    run(engine, [Request(id="b", prompt_ids=prompt, params=SamplingParams(max_tokens=8, seed=2, n=3, ignore_eos=True))])
    assert sum(read) <= 3 * 16, "no more than what lies behind the last whole block of the prompt is read anew"


def test_beyond_the_positions_it_can_place_nothing_is_drafted(tiny, solo):
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    engine, lengths, out = build(tiny, tiny, 1, limit=12), [], {}
    engine.add(request)
    while engine.has_work:
        collect(out, engine.step())
        lengths += [len(out["a", 0]) for n, _ in engine.info.drafts if n]
    assert told(out["a", 0]) == solo(request)
    tried = sum(len(d.token_ids) for d in out["a", 0][1 : 1 + len(lengths)])
    assert lengths and 3 + 1 + tried <= 13 and engine.steps > 10


def test_behind_a_draft_it_is_not_sure_of_it_makes_none(tiny, solo, monkeypatch):
    """Rows of a step each for themselves; with Pace alone, whose steps such a draft costs least where it is the last."""
    requests = [Request(id=str(i), prompt_ids=[20 + i, 21, 22], params=GREEDY) for i in range(3)]
    seen = {}
    for lead in (0.0, 0.2, 1e9):
        monkeypatch.setattr(draft_step, "LEAD", lead)
        engine, drafts, out = build(tiny, tiny, 4, pace=steady(Pace(profile(0.1), 20), 1, 2, 3)), [], {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            collect(out, engine.step())
            engine.check_ledger()
            drafts += engine.info.drafts
        assert {key[0]: told(deltas) for key, deltas in out.items()} == {r.id: solo(r) for r in requests}
        assert all(n == accepted for n, accepted in drafts)
        seen[lead] = [n for n, _ in drafts]
    assert max(seen[0.0]) == TRIES and set(seen[1e9]) == {1} and {1, TRIES} < set(seen[0.2])
    monkeypatch.setattr(draft_step, "LEAD", 1e9)
    engine = build(tiny, tiny, 4)
    assert run(engine, requests[:1])["0", 0] == solo(requests[0]) and engine.steps == 6, "without Pace all that are asked for"


def profile(pass_ms: float) -> Profile:
    """One row and many, of which a step takes as long."""
    sizes = {"batch": (1, 4), "lengths": (LENGTH,), "context": (32,), "prefix": (), "chunk": 32}
    grid = {
        "decode": ((1, LENGTH, 10.0), (4, LENGTH, 10.0)),
        "prefill": ((1, 32, LENGTH, 20.0),),
        "tokens": ((1, 10.0), (4, 10.1), (20, 12.0)),
    }
    return Profile(**sizes, **grid, passes=((1, pass_ms), (4, pass_ms)))


@pytest.mark.parametrize(("pass_ms", "drafts"), [(1.0, True), (12.0, False)])
def test_it_drafts_where_that_pays(tiny, solo, pass_ms, drafts, monkeypatch):
    """And where it does not, it has not read the prompt either."""
    monkeypatch.setattr(draft_step, "LEAD", 0.0)
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    engine = build(tiny, tiny, 2, pace=steady(Pace(profile(pass_ms), 10), 1))
    assert run(engine, [request])["a", 0] == solo(request)
    assert (engine.steps <= 8) == drafts and (engine.steps == 24) == (not drafts)


def paused(engine: Engine, *requests: Request) -> set[str]:
    """Why decode steps tried no draft."""
    for request in requests:
        engine.add(request)
    seen = set()
    while engine.has_work:
        engine.step()
        assert bool(engine.info.paused) == (engine.info.tag == "decode")
        seen.add(engine.info.paused)
    return seen - {""}


def test_why_a_step_tries_none_is_said(tiny):
    """By the draft model's reading, its price, the KV there is, and what a lookup finds."""
    short = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    assert paused(build(tiny, tiny, 2), short) == set()
    assert paused(build(tiny, tiny, 2), replace(short, params=replace(GREEDY, max_tokens=2))) == {"none"}, "the last token has no draft"
    assert paused(build(tiny, tiny, 2, pace=steady(Pace(profile(12.0), 10), 1)), short) == {"cost", "none"}
    assert "behind" in paused(build(tiny, tiny, 2, chunk=8), replace(short, prompt_ids=[20 + i % 9 for i in range(60)]))
    full = [replace(short, id=str(n), prompt_ids=[20 + i % 9 for i in range(n)], params=replace(GREEDY, max_tokens=3)) for n in (31, 63)]
    assert "room" in paused(test_speculation.build(tiny, 2, lambda sequence, most: ((20,) * most, 1), kv_tokens=96, block=16), *full)
    nothing = test_speculation.build(tiny, 1, lambda sequence, most: ((), 0))
    assert paused(nothing, short) == {"none"}
    nothing.scheduler.speculation = Speculation(TRIES, lambda sequence, most: ((), 4), steady(Pace(profile(12.0), 10), 1))
    assert paused(nothing, replace(short, id="b")) == {"cost", "none"}, "what a lookup has found and not told"
    nothing.scheduler.speculation = Speculation(TRIES, lambda sequence, most: ((20,) * most, 4), steady(Pace(profile(12.0), 10)))
    assert paused(nothing, replace(short, id="c")) == {"rest"}, "nobody has told what a step takes without"


@pytest.mark.slow
def test_with_int8_of_the_same_model_text_is_what_it_was(smollm2):
    """Through the deployment's own words, from the profile to the text; and nearly every draft is right."""
    ids = LLM(smollm2, **GENEROUS, dtype="bf16", speculative_config=None)
    with ids as plain:
        prompt = plain.text.chat([{"role": "user", "content": "Name three colours, and say why you like them."}])
        params = [SamplingParams(temperature=0, max_tokens=40), SamplingParams(temperature=0.7, seed=3, max_tokens=40)]
        wanted = [plain.generate([prompt], p)[0].outputs[0].token_ids for p in params]
    said = {"method": "draft_model", "quantization": "int8", "num_speculative_tokens": 3, "adaptive": False}
    with LLM(smollm2, **GENEROUS, dtype="bf16", speculative_config=said) as llm:
        found, steps = [], llm.engine.steps
        for p in params:
            found.append(llm.generate([prompt], p)[0].outputs[0].token_ids)
        assert found == wanted and llm.engine.steps - steps <= 0.6 * sum(map(len, wanted))


def copied(path: Path, folder: Path, **changes) -> Path:
    """A model directory with another config.json, and the embedding cut to it."""
    raw = hub.read_config(path) | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    held = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in held:
            held[name] = held[name][: raw["vocab_size"]].contiguous()
    save_file(held, folder / "model.safetensors")
    return folder


def test_what_does_not_go_together_is_refused_at_start(tiny, tmp_path):
    arch = models.architecture(hub.read_config(tiny))

    def ask(model, **more):
        config = parse({"model": {"path": str(tiny)}, "speculative_config": {"model": str(model), **more}})
        return draft_model(config, tiny, arch, LENGTH, Path)

    assert ask(tiny, quantization="int8").dtype == "bf16" and ask(tiny).limit == LENGTH
    smaller = copied(tiny, tmp_path / "smaller", vocab_size=500)
    with pytest.raises(ConfigError, match=r"speculative_config.model .*vocabulary of 500, the model has 512"):
        ask(smaller)
    words = json.loads((tiny / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    one, two = list(vocab)[20:22]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    swapped = copied(tiny, tmp_path / "swapped")
    (swapped / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match="calls other tokens by the same ids"):
        ask(swapped)
    words["model"]["vocab"] = {f"{token}~": i for token, i in vocab.items()}
    (swapped / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match="calls other tokens by the same ids"):  # not one of which it has
        ask(swapped)
    words["model"] = {"type": "Unigram", "vocab": [[f"{i}~", -1.0] for i in range(512)]}
    (swapped / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match="calls other tokens by the same ids"):  # by pieces and scores
        ask(swapped)
    (swapped / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="speculative_config.model .*tokenizer.json cannot be read as JSON"):
        ask(swapped)
    with pytest.raises(ConfigError, match="speculative_config.model: .*is not a directory"):
        LLM(tiny, speculative_config={"model": "/nowhere"})


def test_what_is_wrong_with_its_files_is_said_of_it(tiny, tmp_path):
    """And not of the model."""
    broken = copied(tiny, tmp_path / "broken")
    for name, text, says in (
        ("model.safetensors", "garbage", "model.safetensors is truncated or no safetensors file"),
        ("model.safetensors", None, "holds no .*safetensors file"),
        ("config.json", "{nope", "config.json cannot be read as JSON"),
        ("config.json", '{"model_type": "whisper"}', "model_type 'whisper' is not supported"),
        ("config.json", None, "config.json does not exist"),
    ):
        (broken / name).unlink() if text is None else (broken / name).write_text(text)
        with pytest.raises((ConfigError, CheckpointError), match=f"speculative_config.model {broken}: .*{says}") as wrong:
            LLM(tiny, **GENEROUS, speculative_config={"model": str(broken)})
        assert wrong.value.param == "speculative_config.model"


@pytest.mark.parametrize("said", [{}, {"num_speculative_tokens": 64, "adaptive": False}, {"quantization": "int8", "method": "draft_model"}])
def test_no_more_is_tried_than_a_sequence_has_room_for(tiny, said):
    for length, words in ((16, {"speculative_config": {"num_speculative_tokens": 64, **said}}), (4, {})):
        sizes = {"max_model_len": length, "max_num_seqs": 2, "threads": 1}
        params = SamplingParams(temperature=0, max_tokens=length - 2, ignore_eos=True)
        with LLM(tiny, **sizes, speculative_config=False) as plain, LLM(tiny, **sizes, **words) as llm:
            wanted, found = (each.generate([{"prompt_token_ids": [20, 21]}], params)[0].outputs[0].token_ids for each in (plain, llm))
        assert found == wanted and len(found) == length - 2
