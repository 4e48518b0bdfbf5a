"""What the steps of this engine have taken since its profile was measured: refined by those that run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from rayneuron.engine.buckets import at_least
from rayneuron.engine.sequence import Plan
from rayneuron.policies.chunks import fit
from rayneuron.policies.cost import RATE, moved
from rayneuron.policies.step_times import decode_grid, prefill_grid
from rayneuron.types import Profile

MOST_OFF = 5.0  # no more of a disturbed step counts than so many times what was expected, or that part of it
FULL = 0.75  # a step that fills less of its bucket says little of those that fill it


@dataclass(slots=True)
class StepInfo:
    """What the last step did: rows and new tokens, the seconds of planning, running and committing, by row with drafts how many there were
    and how many came true, and why there were none (`Plan.paused`)."""

    tag: str = ""
    rows: int = 0
    tokens: int = 0
    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    paused: str = ""

    @classmethod
    def of(cls, plan: Plan, plan_s: float, run_s: float, commit_s: float) -> StepInfo:
        """Of a step that has been committed."""
        works = plan.works
        drafts = [(len(w.drafts), w.accepted) for w in works if w.drafts] if plan.tag == "verify" else []
        tokens = sum([w.count for w in works]) + sum([tried for tried, _ in drafts])
        return cls(plan.tag, len(works), tokens, plan_s, run_s, commit_s, drafts, plan.paused)


class Timing:
    """A profile and what its times have become since. Told by the engine's thread, read by any. `tells`: who else hears of each step, in
    ms with the host's part."""

    def __init__(self, fixed: Profile, tells: Callable[[Plan, float], None] | None = None) -> None:
        self.fixed = fixed
        self._tells = tells
        self._decode, self._prefill = decode_grid(fixed), prefill_grid(fixed)
        chunks = fit(fixed)  # the scheduler stays with that
        self._fitting = chunks.fitting if chunks is not None else ()
        self._host_ms = self._output_tokens = 0.0

    def note(self, plan: Plan, info: StepInfo, overlaps: bool) -> None:
        """A step has run; where it `overlaps` the one before, it took as long as the whole turn."""
        self._host_ms = moved(self._host_ms, 1e3 * (host_s := info.plan_s + info.commit_s))
        run_s = info.run_s + (host_s if overlaps else 0.0)
        if self._tells is not None:
            self._tells(plan, 1e3 * (info.run_s + host_s))
        works, profile = plan.works, self.fixed
        if plan.fills:
            return
        length = max([work.start + work.count for work in works])
        if plan.tag == "decode":
            grid, true, size = self._decode, len(works), at_least(profile.batch, len(works), "batch")
        elif plan.tag == "prefill" and works[0].sequence.prompt_logprobs is None:
            counts = [work.count for work in works]
            grid, true, size = self._prefill, sum(counts), len(counts) * at_least(profile.context, max(counts), "context")
        else:
            return  # drafts, and the logits of a whole prompt, take time of their own
        if not profile.padded:
            size = true
        elif true < FULL * size:
            return
        if profile.padded or grid is self._decode:  # as `Costs` reads them
            length = at_least(profile.lengths, length, "sequence length")
        ratio = min(max(1e3 * run_s / grid.at(size, length), 1 / MOST_OFF), MOST_OFF)
        for at, share in grid.shares(size, length):
            grid.ms[at] *= ratio ** (RATE * share)

    def ended(self, tokens: int) -> None:
        """A choice has ended by itself, with so many tokens."""
        self._output_tokens = moved(self._output_tokens, tokens)

    def profile(self) -> Profile:
        """As it is now."""
        prefill = [(1, tokens, length, ms) for tokens, length, ms in self._prefill.points()]
        changed = {"decode": tuple(self._decode.points()), "prefill": tuple(prefill)}
        return replace(self.fixed, **changed, fitting=self._fitting, host_ms=self._host_ms, output_tokens=self._output_tokens)
