"""Prompts are cut by time while others decode: how far, and that neither text nor KV can tell how."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rayneuron import LLM
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.profile import measure
from rayneuron.engine.scheduler import Scheduler
from rayneuron.engine.sequence import Plan
from rayneuron.models import decoder
from rayneuron.policies.chunks import Chunks, fit
from rayneuron.policies.step_times import prefill_grid
from rayneuron.types import Request, SamplingParams
from tests.engine.test_fuzz import build
from tests.engine.test_scheduler import advance, make

LENGTHS = (16, 32, 64, 128, 256, 512)
LONG = 12_000  # positions


def limit(engine: Engine, *fitting: int) -> None:
    """So many tokens fit into the time of a step, by the positions it attends."""
    engine.scheduler.chunks = Chunks(engine.capacity.context, LENGTHS, fitting) if fitting else None


def ask(name: str, count: int, new: int, **params: Any) -> Request:
    draw = random.Random(name)
    said = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": new, **params})
    return Request(id=name, prompt_ids=[draw.randrange(12, 512) for _ in range(count)], params=said)


def admitted(engine: Engine, prompt: int) -> tuple[list[int], Any, torch.Tensor]:
    """What becomes of a prompt while somebody decodes: the tokens of its steps, the deltas of its first tokens, the KV it leaves."""
    engine.add(ask("stream", 5, 100))
    while not engine.step():
        pass
    engine.add(ask("prompt", prompt, 3, logprobs=5))
    steps, said, blocks = [], [], []
    while len(said) < 3:
        before = engine.steps
        found = [delta for delta in engine.step() if delta.request_id == "prompt"]
        said += [(delta.token_ids, delta.logprobs) for delta in found]
        if engine.steps > before and engine.info.tag == "prefill":
            steps.append(engine.info.tokens)
        held = [s.hold for s in engine.scheduler.running if s.request.id == "prompt" and s.hold is not None]
        blocks = [list(hold.blocks) for hold in held] or blocks
    device: Any = engine.runner.device  # type: ignore[attr-defined]
    kv = device.kv_read(blocks[0][: prompt // engine.capacity.block])
    engine.abort("stream")
    while engine.has_work:
        engine.step()
    return steps, said, kv


def test_the_head_is_computed_only_where_a_prompt_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, heads, greedy = build(tiny, rows=2, length=512, chunk=128, block=16), [], decoder.greedy

    def counted(*args: Any) -> torch.Tensor:
        heads.append(engine.steps)
        return greedy(*args)

    monkeypatch.setattr(decoder, "greedy", counted)
    for request in (ask("a", 300, 1), ask("b", 20, 1)):
        engine.add(request)
    ended = 0
    while engine.has_work:
        ended += bool([delta for delta in engine.step() if delta.finish_reason])
    assert len(heads) == ended < engine.steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ahead", [False, True])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(tiny: Path, dtype: torch.dtype, ahead: bool) -> None:
    engine = build(tiny, rows=2, length=512, chunk=128, block=16, dtype=dtype, ahead=ahead)
    assert min(ms for *_, ms in measure(engine.runner, engine.vocab).prefill) > 0  # and nothing is left of it
    whole = admitted(engine, 300)
    assert whole[0] == [128, 128, 44]
    for fitting, cut in (
        ((4,) * 6, [4] * 75),
        ((128,) * 4 + (64, 16), [128, 64, 64, 16, 16, 12]),  # as its context grows, fewer fit
        ((1,) * 6, [4] * 75),  # never below the smallest shape
        ((32,) * 6, [32] * 9 + [12]),
    ):
        limit(engine, *fitting)
        steps, said, kv = admitted(engine, 300)
        assert steps == cut
        assert said == whole[1], "tokens, and the bits of their probabilities"
        assert torch.equal(kv.view(torch.uint8), whole[2].view(torch.uint8))
    engine.close()


def test_nobody_who_waits_for_no_token_shortens_a_step(tiny: Path) -> None:
    engine = build(tiny, rows=3, length=512, chunk=128, block=16)
    limit(engine, *(16,) * 6)
    for name in ("a", "b"):
        engine.add(ask(name, 200, 40))
    tokens = []
    while engine.has_work:
        engine.step()
        if engine.info.tag == "prefill":
            tokens.append(engine.info.tokens)
    assert tokens[0] == 128, "alone, all of a shape"
    assert max(tokens[tokens.index(72) + 1 :]) == 16, "once the first decodes, the second is cut"
    engine.close()


def test_steps_of_a_long_prompt_shrink_as_it_goes(tiny: Path) -> None:
    """By times as they are where attention is most of a deep step: the steps never grow, the last have a fraction of the first's tokens,
    and what is said is what it says alone."""
    engine = build(tiny, rows=2, length=LONG, chunk=512, block=64, fine=True)
    profile, deepest = measure(engine.runner, engine.vocab), LONG
    profile = replace(profile, prefill=tuple((b, t, n, 0.2 + b * t * (4e-3 + 8e-6 * n)) for b, t, n, _ in profile.prefill))
    assert engine.capacity.context[0] < 32
    grid = prefill_grid(profile)
    assert grid.at(512, deepest) > 2 * grid.at(512, 512), "the scene is set"
    chunks = fit(replace(profile, chunk_ms=1.2 * grid.at(16, deepest)))
    prompt, told = ask("long", LONG - 200, 4), []
    for beside in (False, True):
        engine.scheduler.chunks = chunks if beside else None
        if beside:
            engine.add(ask("stream", 5, 10_000))
            while not engine.step():
                pass
        engine.add(prompt)
        steps, tokens = [], list[int]()
        while len(tokens) < 4:
            before = engine.steps
            tokens += [token for delta in engine.step() if delta.request_id == "long" for token in delta.token_ids]
            if engine.steps > before and engine.info.tag == "prefill":
                steps.append(engine.info.tokens)
        told.append(tokens)
    assert steps[:-1] == sorted(steps[:-1], reverse=True) and sum(steps) == LONG - 200
    assert steps[0] >= 4 * steps[-2] and steps[-2] <= 32
    assert told[0] == told[1]
    engine.close()


def test_prompts_that_are_scored_are_cut_too(tiny: Path) -> None:
    """Their shapes are shorter, and the head of every token is computed."""
    engine = build(tiny, rows=2, length=512, chunk=128, block=16)
    told = []
    for fitting in ((), (4,) * 6):
        limit(engine, *fitting)
        engine.add(ask("stream", 5, 60))
        engine.step()
        engine.add(ask("scored", 40, 1, prompt_logprobs=1))
        steps = []
        while engine.has_work:
            told += [d.prompt_logprobs for d in engine.step() if d.request_id == "scored"]
            if engine.info.tag == "prefill":
                steps.append(engine.info.tokens)
        assert steps == ([8] * 5 if not fitting else [4] * 10)
    assert told[0] == told[1]
    engine.close()


class Watched(Scheduler):
    """Holds every plan it makes against what may be in one."""

    def plan(self) -> Plan | None:
        made = super().plan()
        if made is not None and made.tag == "prefill" and any(s.phase == "decode" for s in self.running):
            assert sum(w.count for w in made.works) <= self.chunks.most(max(w.start for w in made.works))
        return made


SIZES = st.sampled_from([4, 8, 16, 32, 40])


@settings(max_examples=30)
@given(st.lists(SIZES, min_size=3, max_size=3), st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_no_step_is_longer_while_somebody_decodes(fitting: list[int], prompts: list[int]) -> None:
    held = capacity(rows=3, length=64, chunk=40, smallest=16, smallest_context=4, block=16)
    scheduler = Watched(held, chunks=Chunks(held.context, held.lengths, tuple(fitting)))
    sequences = [make(order, prompt, 64 - prompt) for order, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    while advance(scheduler) is not None:
        pass
    assert all(len(sequence.ids) == 64 for sequence in sequences) and scheduler.blocks.used == 0


HAYSTACK, NEEDLE_AT, NEEDLES, QUERY = 33_000, 100, range(120, 127), 127
SCALED = {
    "llama3": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 4096,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
}  # fmt: skip


def planted(folder: Path, rope: dict[str, Any]) -> tf.LlamaForCausalLM:
    """A random model, one head of which looks for any of NEEDLES where it sees QUERY, over the slowest of its rotations, and repeats it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    config = tf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=65536, rope_parameters=rope)
    model = tf.LlamaForCausalLM(config).eval().float()
    attention, embedded = model.model.layers[0].self_attn, model.model.embed_tokens.weight
    with torch.no_grad():
        embedded.normal_()
        embedded[:, 64:] = 0
        attention.q_proj.weight[:32] = 0
        attention.q_proj.weight[15, 73] = attention.k_proj.weight[15, 72] = 6.0
        for i, token in enumerate(NEEDLES):
            embedded[token, [64 + i, 72]] = 3.0
            attention.v_proj.weight[i, 64 + i] = 1.0
            attention.o_proj.weight[80 + i, i] = 4.0
            model.lm_head.weight[token, 80 + i] = 2.0
        embedded[QUERY, 73] = 3.0
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALED)
def test_a_needle_far_beyond_the_original_length(kind: str, tmp_path: Path) -> None:
    """Eight times the length the frequencies were trained for: transformers' own logits, the same bits however the prompt is cut."""
    model = planted(tmp_path, SCALED[kind])
    draw = random.Random(kind)
    ids, needle = [draw.randrange(119) for _ in range(HAYSTACK)], draw.choice(NEEDLES)
    ids[NEEDLE_AT], ids[-1] = needle, QUERY
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].log_softmax(-1)
    assert int(expected.argmax()) == needle, "the scene is set"
    seen = []
    for chunk in (512, 2048, 96):
        said = {"path": str(tmp_path), "skip_tokenizer_init": True}
        with LLM(model=said, dtype="fp32", max_model_len=HAYSTACK + 64, max_num_seqs=1, prefill_chunk_tokens=chunk) as llm:
            (out,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=3, logprobs=20, ignore_eos=True))
            device: Any = llm.engine.runner.device  # type: ignore[attr-defined]
            seen.append((out.outputs[0].token_ids, out.outputs[0].logprobs, device.kv_read(range(HAYSTACK // llm.engine.capacity.block))))
    ids_found, probabilities, kv = seen[0]
    assert ids_found[0] == needle
    assert all(abs(entry.logprob - expected[token].item()) < 2e-4 for token, entry in probabilities[0].items())
    for other in seen[1:]:
        assert other[:2] == (ids_found, probabilities) and torch.equal(other[2], kv)
