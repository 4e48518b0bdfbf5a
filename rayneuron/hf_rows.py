"""The rows of a HuggingFace generate(): prompts of its batch, adapters of its prompts, and its output as one tensor.

Shapes: B prompts, N sequences a prompt, L tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import RequestError


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """input_ids [B, L] without what the mask hides. Raises RequestError."""
    if input_ids.dim() != 2:
        raise RequestError(f"input_ids must be [batch, length], got {list(input_ids.shape)}", param="input_ids")
    if attention_mask is None:
        return input_ids.tolist()
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]


def inferred(input_ids: Tensor, settings: dict[str, Any]) -> Tensor | None:
    """transformers' rule where no mask is given: `pad_token_id` marks padding, wherever it stands, unless EOS is the same token."""
    pad, eos = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is None or pad in (eos if isinstance(eos, (list, tuple)) else [eos]):
        return None
    mask: Tensor = input_ids != pad
    return mask


def adapters_of(said: Sequence[str | None] | None, prompts: int) -> list[str | None]:
    """The adapter of each prompt by name, None for none. Raises RequestError."""
    if said is None:
        return [None] * prompts
    if isinstance(said, str) or len(said) != prompts:
        raise RequestError(f"adapter_ids must be a list of {prompts} names, one a prompt, got {said!r:.80}", param="adapter_ids")
    return list(said)


def pad_id(settings: dict[str, Any], eos_ids: Collection[int]) -> int:
    """What a row is padded with: pad_token_id, else the first EOS."""
    if settings.get("pad_token_id") is not None:
        return int(settings["pad_token_id"])
    return min(eos_ids, default=0)


def padded(input_ids: Tensor, made: list[list[int]], copies: int, pad: int) -> Tensor:
    """[B*N, L']: each prompt as it was given, and behind it what was made, padded at the right."""
    longest = max(map(len, made), default=0)
    out = torch.full((len(made), input_ids.shape[1] + longest), pad, dtype=torch.int64)
    out[:, : input_ids.shape[1]] = input_ids.repeat_interleave(copies, 0)
    for row, tokens in zip(out, made, strict=True):
        row[input_ids.shape[1] : input_ids.shape[1] + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return out
