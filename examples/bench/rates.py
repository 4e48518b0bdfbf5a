"""From the steps of a generation to tokens a second: one definition for every engine that is compared (standard library only)."""

from __future__ import annotations

from collections.abc import Sequence

Step = tuple[float, Sequence[int]]  # seconds since the request was made, tokens each row has by then


def decode_rate(steps: Sequence[Step]) -> float:
    """Tokens after the first / time after the first, while the batch is full.

    Engines that start rows one after another already decode some while others are in their prompt, and end some before others. So counting
    begins at the first step after which every row has a token, and ends at the first after which a row has all of its own.
    """
    last = max(steps[-1][1])
    begin = next(i for i, (_, counts) in enumerate(steps) if min(counts) >= 1)
    end = next(i for i, (_, counts) in enumerate(steps) if max(counts) >= last)
    if end <= begin:
        raise ValueError("the batch was never full: ask for more new tokens")
    (from_s, before), (to_s, after) = steps[begin], steps[end]
    return (sum(after) - sum(before)) / (to_s - from_s)


def prefill_rate(prompt_tokens: int, steps: Sequence[Step]) -> float:
    """Prompt tokens / time to the first token of one prompt."""
    return prompt_tokens / steps[0][0]
