"""transformers `generate`: dynamic cache, greedy, one padded batch; its prompts must be of one length."""

from __future__ import annotations

import time
from typing import Any

import torch
from answer import Run, Steps, answer
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Clock(StoppingCriteria):
    """Notes the time after every token; never stops."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.steps: Steps = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        rows, length = input_ids.shape
        self.steps.append((time.perf_counter(), [length - self.prompt] * rows))
        return torch.zeros(rows, dtype=torch.bool)


def open_peer(settings: dict[str, Any]) -> Run:
    """settings: model, dtype, threads."""
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=DTYPES[settings["dtype"]]).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new: int) -> Steps:
        ids = torch.tensor(prompts)
        clock = Clock(ids.shape[1])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.steps

    return run


if __name__ == "__main__":
    answer(open_peer)
