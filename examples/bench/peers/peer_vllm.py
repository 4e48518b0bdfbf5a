"""vLLM's CPU build, offline, prefix caching off; runs in a virtual environment of its own (README.md)."""

from __future__ import annotations

import time
from typing import Any

from answer import Run, Steps, answer

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def open_peer(settings: dict[str, Any]) -> Run:
    """settings: model, dtype, rows, length, eager."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        model=settings["model"],
        dtype=DTYPES[settings["dtype"]],
        max_model_len=settings["length"],
        max_num_seqs=settings["rows"],
        enable_prefix_caching=False,
        enforce_eager=settings.get("eager", False),
        disable_log_stats=True,
    ).llm_engine
    made = 0

    def run(prompts: list[list[int]], new: int) -> Steps:
        nonlocal made
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        base, made = made, made + len(prompts)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(base + i), TokensPrompt(prompt_token_ids=prompt), params)
        counts = [0] * len(prompts)
        steps: Steps = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            for output in outputs:
                counts[int(output.request_id.split("-")[0]) - base] = len(output.outputs[0].token_ids)
            if outputs:
                steps.append((time.perf_counter(), counts.copy()))
        return steps

    return run


if __name__ == "__main__":  # vLLM starts its engine by spawning: an unguarded script would start itself for ever
    answer(open_peer)
