"""Medusa, EAGLE and EAGLE-3 in the step change no token, and draft what the papers' own arithmetic drafts."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from rayneuron import LLM, SamplingParams, StructuredOutputs, demo, devices, models
from rayneuron.devices.cpu import panels
from rayneuron.engine import head_step
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import Runner
from rayneuron.engine.speculation.drafting import Chain, Speculation, predicted
from rayneuron.engine.speculation.pace import Pace
from rayneuron.models import head_layers, heads, hub, weights
from rayneuron.types import Request
from tests.engine import test_speculation
from tests.engine.test_draft_model import profile
from tests.engine.test_fuzz import LENGTH
from tests.engine.test_pace import steady
from tests.engine.test_speculation import GREEDY, TRIES, VOCAB, fuzz, run
from tests.models import published

solo = test_speculation.solo
MADE = {
    "medusa": published.medusa,
    "medusa-vllm": lambda target: published.medusa(target, heads=4, blocks=2, vllm=True),
    "eagle": published.eagle,
    "eagle-bare": lambda target: published.eagle(target, own=False),
    "eagle3": lambda target: published.eagle3(target, known=300, own=True),
    "eagle3-normed": lambda target: published.eagle3(target, norm_before_residual=True),
}


def cases(quick: list, every: list) -> list:
    """Of every case the quick ones in each run, the others in slow ones."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in every]


EXACT = cases([("medusa", 0), ("eagle", 1), ("eagle3", 0)], [(name, seed) for name in MADE for seed in range(4)])
DRAFTS = cases([*((name, 16) for name in MADE), ("eagle", 64)], [(name, block) for name in MADE for block in (None, 16, 64)])


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """The directory of heads by name, and what they say."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    root, known = tmp_path_factory.mktemp("heads"), {}

    def of(name: str) -> tuple[Path, published.Reader]:
        if name not in known:
            config, held = MADE[name](hub.read_config(tiny))
            file = "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors"
            known[name] = published.write(root / name, config, held, file), published.Reader(model, config, held)
        return known[name]

    return of


def build(path, folder: Path, method: str, rows: int, *, native=True, limit: int = LENGTH, pace: Pace | None = None, **sizes) -> Engine:
    """As `test_speculation.build`, with heads."""
    raw = hub.read_config(path)
    arch, cached = models.architecture(raw), sizes.pop("cached", False)
    data = heads.read(method, hub.read_config(folder), heads.shapes(folder), arch)
    held = weights.load(arch, models.family(raw), hub.Checkpoint(path), dtype=torch.float32)
    sizes = {"chunk": 16, "smallest": 16, "smallest_context": 4, "scores": 8, "verify": 1 + TRIES, "drafts": "heads", **sizes}
    c = capacity(rows=rows, length=LENGTH, **sizes)
    device = devices.open("cpu", ahead=devices.Ahead(), dtype=torch.float32, threads=1, **({} if native else {"native": False}))
    runner = Runner(arch, device, c, partial(head_step.step, arch, data), data)
    runner.load({**held, "draft": head_layers.load(data, hub.Checkpoint(folder), dtype=torch.float32)})
    runner.warm(lambda *_: None)
    speculation = Speculation(TRIES, partial(predicted, 1, 3), pace, Chain(None, limit, data.most or TRIES))
    return Engine(runner, vocab=arch.vocab, eos_ids=(7, 11), model="tiny" if cached else None, speculation=speculation)


def watch(engine: Engine) -> list[tuple[list[int], tuple[int, ...]]]:
    """(ids, drafts) of every row that drafts, once they are known."""
    plan, plans, seen = engine.scheduler.plan, [], []
    step = engine.step

    def watched():
        made = plan()
        if made is not None and made.tag == "verify":
            plans.append([(list(w.sequence.ids[: w.start + 1]), w) for w in made.works if w.drafts])
        return made

    def stepped():
        deltas = step()
        for rows in plans:
            seen.extend((ids, w.drafts) for ids, w in rows)
        plans.clear()
        return deltas

    engine.scheduler.plan, engine.step = watched, stepped
    return seen


def check(seen, reader: published.Reader) -> int:
    """Every draft is the likeliest of its head, rounding aside; how many were looked at."""
    for ids, drafts in {(tuple(ids), drafts) for ids, drafts in seen}:
        for draft, logits in zip(drafts, reader(list(ids), list(drafts)), strict=True):
            assert logits[draft] >= logits.max() - 1e-4, (len(ids), drafts)
    return sum(len(drafts) for _, drafts in seen)


@pytest.mark.parametrize(("name", "seed"), EXACT)
def test_every_choice_is_told_what_it_is_told_alone(tiny, made, solo, name, seed):
    """With preemption, aborts, chunks, forks, blocks and a prefix cache."""
    rng = random.Random(200 + seed)
    families = [[rng.randrange(12, VOCAB) for _ in range(6)] * 11 for _ in range(3)]
    sizes = {"kv_tokens": rng.choice([96, 144, None]), "block": 16, "chunk": rng.choice([8, 32]), "cached": seed % 2 == 1}
    engine = build(tiny, made(name)[0], name.partition("-")[0], rng.choice([2, 3, 5]), **sizes)
    drafts = fuzz(engine, rng, solo, families)
    assert sum(n for n, _ in drafts) > 100


@pytest.mark.parametrize(("name", "block"), DRAFTS)
def test_drafts_are_those_of_the_papers(tiny, made, solo, name, block):
    """Of greedy rows beside each other, in chunks, forked, preempted, and behind prefixes that others have computed."""
    folder, reader = made(name)
    engine = build(tiny, folder, name.partition("-")[0], 4, block=block, cached=block == 16, kv_tokens=128 if block == 16 else None)
    seen, shared = watch(engine), [20 + i % 7 for i in range(40)]
    requests = [Request(id=f"r{i}", prompt_ids=[*shared[: 40 - 9 * i], 30 + i], params=GREEDY) for i in range(4)]
    for turn in range(2):
        out = run(engine, [replace(request, id=f"{request.id}{turn}") for request in requests])
        assert out == {(f"{r.id}{turn}", 0): solo(r) for r in requests}
    assert (engine.scheduler.preemptions > 0) == (block == 16)
    assert check(seen, reader) > 100


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_with_the_ops_of_torch(tiny, made, solo, name):
    folder, reader = made(name)
    engine = build(tiny, folder, name, 2, native=False)
    seen = watch(engine)
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    assert run(engine, [request])["a", 0][0] == solo(request)[0]
    assert check(seen, reader) > 40


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_choices_that_share_a_prompt_have_its_features(tiny, made, solo, name):
    """Sampled drafts are chosen with the numbers of their places, by every choice from the prompt that one has computed."""
    folder, _ = made(name)
    engine = build(tiny, folder, name, 4, block=16)
    seen = watch(engine)
    params = SamplingParams(max_tokens=12, seed=3, n=3, ignore_eos=True)
    request = Request(id="a", prompt_ids=[20 + i % 9 for i in range(37)], params=params)
    out = run(engine, [request])
    assert all(out["a", i] == solo(request, i) for i in range(3)) and len(seen) > 12
    alone = build(tiny, folder, name, 1, block=16)
    again = watch(alone)
    for i in range(3):
        run(alone, [Request(id="b", prompt_ids=request.prompt_ids, params=replace(request.params, n=1, seed=3 + i))])
    both = {tuple(ids): drafts for ids, drafts in seen}
    found = [both[tuple(ids)] == drafts for ids, drafts in again if tuple(ids) in both]
    assert len(found) > 24 and all(found)


@pytest.mark.parametrize(("name", "most"), [("medusa", 3), ("eagle", TRIES)])
def test_no_more_are_drafted_than_there_are_heads(tiny, made, name, most):
    engine = build(tiny, made(name)[0], name, 1)
    seen = watch(engine)
    run(engine, [Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)])
    assert max(len(drafts) for _, drafts in seen) == most


def test_beyond_the_positions_they_can_place_nothing_is_drafted(tiny, made, solo):
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    engine = build(tiny, made("eagle")[0], "eagle", 1, limit=12)
    seen = watch(engine)
    assert run(engine, [request])["a", 0] == solo(request)
    assert seen and max(len(ids) + len(drafts) for ids, drafts in seen) == 12


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3-normed"])
def test_learnt_heads_save_steps(tiny, made, solo, tmp_path, name):
    """Seconds of learning a few texts by heart, by the papers' arithmetic: more than one draft of a step comes true."""
    _, reader = made(name)
    config, held = MADE[name](hub.read_config(tiny))
    prompts = [[20 + i, 40 + i, 60 + i] for i in range(3)]
    requests = [Request(id=str(i), prompt_ids=prompt, params=GREEDY) for i, prompt in enumerate(prompts)]
    learnt = published.learn(published.Reader(reader.model, config, held), [[*r.prompt_ids, *solo(r)[0]] for r in requests])
    folder, tokens = published.write(tmp_path, config, learnt), len(requests) * (GREEDY.max_tokens - 1)  # each prompt's step gives one more
    for pass_ms, least in ((None, 1.0), (1.0, 0.8), (12.0, 0.0)):
        engine = build(tiny, folder, name.partition("-")[0], 1, pace=None if pass_ms is None else steady(Pace(profile(pass_ms), 10), 1))
        for request in requests:
            assert run(engine, [request])[request.id, 0] == solo(request)
        steps = engine.steps - len(requests)
        assert (tokens - steps) / steps > least if least else steps > 0.7 * tokens, "accepted drafts of a step; few where they are dear"


@pytest.fixture(scope="module")
def larger() -> Path:
    """Four layers, and heads of a size whose KV lies in panels."""
    return demo.random("tp8", dtype="fp32")


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_where_kv_lies_in_panels(larger, tmp_path, name):
    """In blocks of 64, which two prompts share: drafts are those of the papers there too."""
    raw = hub.read_config(larger)
    config, held = published.eagle(raw, heads=8) if name == "eagle" else published.eagle3(raw, heads=8, known=300)
    reader = published.Reader(AutoModelForCausalLM.from_pretrained(larger, dtype=torch.float32), config, held)
    engine = build(larger, published.write(tmp_path, config, held), name, 2, block=64, cached=True, chunk=32)
    assert panels.lie(engine.runner.device.kv.draft.layers[0])
    seen = watch(engine)
    prompt = [20 + i % 9 for i in range(80)]
    for tail in ([], [30]):
        run(engine, [Request(id=f"p{len(tail)}", prompt_ids=prompt + tail, params=replace(GREEDY, max_tokens=8))])
    assert check(seen, reader) > 20


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_as_a_deployment_says_it(larger, tmp_path, name):
    """In bf16, with an int8 model, adaptive and with a grammar: the text is what it was, and what was drafted is counted."""
    raw = hub.read_config(larger)
    made = {"medusa": published.medusa, "eagle": partial(published.eagle, own=False, heads=8), "eagle3": partial(published.eagle3, heads=8)}
    folder = published.write(tmp_path, *made[name](raw), "medusa_lm_head.safetensors" if name == "medusa" else "model.safetensors")
    prompts = [[20 + i % 7 for i in range(30 * n)] for n in (1, 2, 3)]
    shapes = {"dtype": "bf16", "max_model_len": 128, "max_num_seqs": 4, "threads": 1, "quantization": "int8"}
    regex = StructuredOutputs(regex="[a-c]{12}")
    kinds = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=4, max_tokens=12, logprobs=2)]
    kinds += [SamplingParams(temperature=0, max_tokens=20, structured_outputs=regex)]

    def told(**more) -> tuple[list, int]:
        tried = 0
        with LLM(larger, **shapes, **more) as llm:
            step = llm.engine.step

            def counted():
                nonlocal tried
                deltas = step()
                tried += sum(n for n, _ in llm.engine.info.drafts)
                return deltas

            llm.engine.step = counted
            return [(o.token_ids, o.logprobs) for p in kinds for r in llm.generate(prompts, p) for o in r.outputs], tried

    wanted, none = told(speculative_config=False)
    for more in ({"adaptive": False}, {}):
        found, tried = told(speculative_config={"method": name, "model": str(folder), **more})
        assert found == wanted and (tried > 50 or not more) and not none
