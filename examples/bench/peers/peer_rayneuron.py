"""This project's engine, offline, without any server around it."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from answer import Run, Steps, answer

from rayneuron.config import parse
from rayneuron.loading import open_engine
from rayneuron.types import Request, SamplingParams


def open_peer(settings: dict[str, Any]) -> Run:
    """settings: model, dtype, threads, rows, length."""
    opened = open_engine(
        parse(
            {
                "model": {"path": settings["model"]},
                "dtype": "bf16" if settings["dtype"] == "int8" else settings["dtype"],
                "quantization": "int8" if settings["dtype"] == "int8" else None,
                "threads": settings["threads"],
                "max_num_seqs": settings["rows"],
                "max_model_len": settings["length"],
                "speculative_config": False,  # peers draft nothing, and text without an end repeats itself: drafts would be flattered
            }
        )
    )
    engine = opened.engine

    def run(prompts: list[list[int]], new: int, at_once: int = 0) -> Steps:
        """`at_once`: so many prompts are in the engine at any time, the next is added when one ends; 0: all."""
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        requests = iter([Request(id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)])
        for request in islice(requests, at_once or None):
            engine.add(request)
        counts = [0] * len(prompts)
        steps: Steps = []
        while engine.has_work:
            deltas = engine.step()
            for delta in deltas:
                if delta.error:
                    raise RuntimeError(delta.error)
                counts[int(delta.request_id)] += len(delta.token_ids)
                if delta.finish_reason and (following := next(requests, None)) is not None:
                    engine.add(following)
            if deltas:
                steps.append((time.perf_counter(), counts.copy()))
        return steps

    return run


if __name__ == "__main__":
    answer(open_peer)
