"""Names of transformers-neuronx and NxD Inference over our engine, for programs that were written for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron import devices
from rayneuron.errors import RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter, pad_id


def device() -> str:
    """Where such a program runs: on Neuron, or on the CPU of a machine without it."""
    return "neuron" if devices.installed("neuron") else "cpu"


def by_row(
    adapter: HuggingFaceGenerationAdapter, input_ids: Tensor, each: Sequence[dict[str, Any]], mask: Tensor | None, **words: Any
) -> Any:
    """`generate()` where each row has settings of its own."""
    if all(one == each[0] for one in each):
        return adapter.generate(input_ids, mask, **words, **each[0])
    if words.get("return_dict_in_generate"):
        said = "return_dict_in_generate needs rows that are sampled alike; leave it out, or send them one by one"
        raise RequestError(said, param="return_dict_in_generate")
    rows = [
        adapter.generate(input_ids[i : i + 1], None if mask is None else mask[i : i + 1], **words, **one)[0] for i, one in enumerate(each)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id(words, adapter.llm))
