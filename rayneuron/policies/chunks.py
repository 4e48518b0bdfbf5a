"""How much of a prompt one step computes while others wait for their next token: what fits into the time they are asked to wait."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from msgspec.structs import replace

from rayneuron.policies.step_times import decode_grid, prefill_grid
from rayneuron.types import Profile

DECODE_STEPS = 4.0  # a prefill step takes as long as so many where nobody says how long
SURE = 0.85  # of the limit: what is known of a step is the lesser of two runs, over KV that nobody had used


@dataclass(frozen=True, slots=True)
class Chunks:
    """fitting[i]: the most new tokens, a size of `context`, of a step that attends lengths[i] positions and takes its time at most."""

    context: tuple[int, ...]
    lengths: tuple[int, ...]
    fitting: tuple[int, ...]

    def most(self, done: int) -> int:
        """New tokens of a step, of all its rows together, behind at most `done` positions; never less than the smallest size."""
        for tokens in reversed(self.context):
            at = min(bisect_left(self.lengths, done + tokens), len(self.lengths) - 1)
            if tokens <= self.fitting[at]:
                return tokens
        return self.context[0]


def fit(profile: Profile) -> Chunks | None:
    """What the profile's times say of `chunk_ms`, unless an engine has kept what they said when it began; None where steps may take any
    time."""
    if not profile.chunk_ms:
        return None
    grid, context, most_ms = prefill_grid(profile), tuple(t for t in profile.context if t <= profile.chunk), SURE * profile.chunk_ms
    if profile.fitting:
        return Chunks(context, profile.lengths, profile.fitting)
    fitting = [max((t for t in context if grid.at(t, length) <= most_ms), default=context[0]) for length in profile.lengths]
    return Chunks(context, profile.lengths, tuple(fitting))


def limited(profile: Profile, chunk_ms: float | None) -> Profile:
    """With the longest time of a prefill step while others decode: what the deployment says, else so many decode steps of some rows."""
    if chunk_ms is None:
        rows = profile.batch[len(profile.batch) // 2]
        chunk_ms = DECODE_STEPS * decode_grid(profile).at(rows, profile.lengths[0])
    return replace(profile, chunk_ms=chunk_ms)
