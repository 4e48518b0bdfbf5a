"""Names of transformers-neuronx and NxD Inference over our engine, for programs that were written for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron import devices
from rayneuron.errors import RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter
from rayneuron.hf_rows import adapters_of, pad_id


def device() -> str:
    """Where such a program runs: on Neuron, or on the CPU of a machine without it."""
    return "neuron" if devices.installed("neuron") else "cpu"


def by_row(
    adapter: HuggingFaceGenerationAdapter, input_ids: Tensor, each: Sequence[dict[str, Any]], mask: Tensor | None,
    adapter_ids: Sequence[str | None] | None = None, **words: Any,
) -> Any:  # fmt: skip
    """`generate()` where each row has settings of its own."""
    if all(one == each[0] for one in each):
        return adapter.generate(input_ids, mask, adapter_ids=adapter_ids, **words, **each[0])
    if words.get("return_dict_in_generate"):
        said = "return_dict_in_generate needs rows that are sampled alike; leave it out, or send them one by one"
        raise RequestError(said, param="return_dict_in_generate")
    names = adapters_of(adapter_ids, len(each))
    rows = [
        adapter.generate(input_ids[i : i + 1], None if mask is None else mask[i : i + 1], adapter_ids=[names[i]], **words, **one)[0]
        for i, one in enumerate(each)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id(words, adapter.llm.text.eos_ids))
