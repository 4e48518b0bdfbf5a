"""Texts that a model wrote, served once more without it: steps take what such steps took, and drafts come true as they would have.

`replayed.json`: of SmolLM2-135M-Instruct in bf16, greedily, by the kinds of prompts of `examples/bench/speculation.py`, sixteen texts each:
how many ids the prompt has, and prompt and output, a character an id, in the order in which ids first come.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.engine.speculation.drafting import Speculation, look_up
from rayneuron.engine.speculation.pace import LOOK_MS, Pace
from rayneuron.models.kv import KvSpace
from rayneuron.policies.step_times import between
from rayneuron.types import Profile, Request, SamplingParams, TokenDelta

Text = tuple[int, list[int]]  # ids of the prompt; those and the output's
TEXTS: dict[str, list[Text]] = {
    kind: [(prompt, list(map(ord, ids))) for prompt, ids in texts]
    for kind, texts in json.loads((Path(__file__).parent / "replayed.json").read_text()).items()
}
# (drafts, ms of a step) by rows, on two cores of an AMD EPYC 9004: the least of 20 each. Drafts were spread evenly; where one row has more
# than others, places of those that stay empty take PADDED_MS each.
STEPS = {
    1: [(0, 7.4), (1, 9.0), (2, 9.9), (4, 10.6), (8, 10.7)],
    2: [(0, 9.1), (1, 10.3), (6, 10.4), (8, 11.0), (12, 12.4), (16, 16.2)],
    4: [(0, 10.3), (1, 10.6), (4, 10.9), (8, 11.9), (12, 14.2), (16, 17.8), (24, 23.8), (32, 29.2)],
    8: [(0, 11.3), (1, 11.7), (4, 12.4), (8, 14.6), (12, 18.3), (16, 20.8), (32, 32.9), (48, 44.1), (64, 55.5)],
    12: [(0, 13.6), (1, 13.7), (2, 14.2), (4, 15.7), (8, 19.2), (16, 24.3), (32, 35.9), (64, 59.3), (96, 82.0)],
    16: [(0, 16.7), (1, 18.1), (2, 19.1), (4, 20.2), (8, 22.6), (16, 28.3), (32, 39.4), (64, 63.5), (96, 85.7), (128, 110.5)],
}
PADDED_MS = 0.02
# What starts of a deployment measured there, beside others: (tokens, ms) of a step, and (rows, ms) of one without drafts.
MEASURED = {
    "even": (((1, 9.0), (2, 9.0), (4, 9.4), (5, 9.9), (16, 14.6), (17, 15.8), (32, 24.9), (144, 103.6)), ((1, 9.0), (4, 10.4), (16, 15.5))),
    "off": (((1, 8.8), (2, 9.3), (4, 9.7), (8, 9.7), (16, 14.7), (17, 14.7), (32, 20.3), (144, 98.2)), ((1, 8.8), (4, 10.9), (16, 20.2))),
    "steep": (((1, 8.5), (2, 9.9), (8, 11.1), (16, 15.7), (17, 18.0), (32, 26.4), (144, 102.6)), ((1, 8.5), (4, 10.2), (16, 14.8))),
    "dear": (((1, 8.0), (2, 10.5), (8, 10.8), (16, 15.9), (17, 17.2), (32, 26.2), (144, 106.8)), ((1, 8.0), (4, 11.5), (16, 16.9))),
}


def step_ms(drafts: list[int]) -> float:
    """What a step of so many rows takes that tries so many drafts of each."""
    rows, tried = len(drafts), sum(drafts)
    low, high = max(r for r in STEPS if r <= rows), min(r for r in STEPS if r >= rows)
    known = [(r, between(STEPS[r], tried)) for r in sorted({low, high})]
    return between(known, rows) + PADDED_MS * (rows * max(drafts) - tried) * (tried > 0)


def adaptive(start: str) -> Speculation:
    """As many drafts as pay, by what one of the starts measured."""
    tokens, decode = MEASURED[start]
    sizes = {"batch": (1, 2, 4, 8, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32, "padded": False}
    profile = Profile(**sizes, decode=tuple((rows, 128, ms) for rows, ms in decode), prefill=(), tokens=tokens)
    pace = Pace(profile, 16 * 9)
    return Speculation(8, partial(look_up, 2, 4, pace=pace), pace)


def fixed(count: int) -> Speculation | None:
    """Always so many, where there are any."""
    return Speculation(count, partial(look_up, 2, 4)) if count else None


def serve(texts: list[Text], made: Speculation | None, every: int = 0) -> float:
    """ms of all steps in which texts are served together; one more begins every so many steps, 0: all at once."""
    blocks, rows, total, steps = Blocks(KvSpace(16, 64, 16, 64)), list[Sequence](), 0.0, 0
    for i, (prompt, ids) in enumerate(texts):
        params = SamplingParams(max_tokens=len(ids) - prompt, temperature=0.0)
        asked = Request(id=str(i), prompt_ids=ids[:prompt], params=params)
        rows.append(Sequence(asked, 0, ids[: prompt + 1], seed=0, max_tokens=params.max_tokens, order=i, prompt_len=prompt))
    while left := [row for row in rows if row.generated < row.max_tokens]:
        here = [row for row in left if row.order * every <= steps] or left[:1]
        plan = Plan("decode", [Work(row, len(row.ids) - 1, 1, True, 0) for row in here])
        ms = 0.0
        if made is not None:
            made.draft(plan, blocks)
            ms += LOOK_MS * len(here) * (made._pace is None or made._pace.looks)
        ms += step_ms([len(work.drafts) for work in plan.works])
        deltas = [TokenDelta(work.sequence.request.id, 0, _take(work, texts[work.sequence.order][1])) for work in plan.works]
        if made is not None:
            if plan.tag == "verify":
                made.learn(plan, deltas)
            made.took(plan, ms)
        total, steps = total + ms, steps + 1
    return total


def _take(work: Work, ids: list[int]) -> list[int]:
    """The ids that a step gives: those of its drafts that are the text's, and one more."""
    at = len(work.sequence.ids)
    came = 0
    while came < len(work.drafts) and at + came < len(ids) and work.drafts[came] == ids[at + came]:
        came += 1
    work.accepted, given = came, ids[at : at + came + 1]
    work.sequence.ids += given
    return given
