"""What the host reads out of logits: the token where the device could not or must not choose it, and logprobs.

Shapes: T new tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayneuron.engine import logits, neuron_sampling, sampling
from rayneuron.engine.grammar import Mask
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError


class HostSampling:
    """`commit.ReadsLogits` with torch. `rule`: as in `engine.step.step`."""

    logprobs = staticmethod(logits.logprobs)
    prompt_logprobs = staticmethod(logits.prompt_logprobs)

    def __init__(self, rule: NeuronSampling | None = None) -> None:
        self._rule = rule

    def next_id(self, row: Tensor, sequence: Sequence) -> int:
        """The same choice as the device's, after editing the row [V], over the whole vocabulary."""
        params = sequence.params
        if params.edits_logits:
            row = logits.edit(row, sequence)
        if sequence.grammar is not None:
            return self._allowed(row, sequence, sequence.grammar.mask())
        if params.greedy:
            return int(row.argmax())
        return self._draw(row, sequence, None)

    def _allowed(self, row: Tensor, sequence: Sequence, mask: Mask) -> int:
        """The same choice among the ids that a constraint allows."""
        token = self._draw(row, sequence, mask)
        if not mask[token // 32] >> (token % 32) & 1 or row[token] == logits.BANNED:
            said = "no token is left to choose: what the output must match allows only what ids, words or n-grams forbid"
            raise RequestError(said, param=sequence.params.structured_outputs.field if sequence.params.structured_outputs else None)
        return token

    def _draw(self, row: Tensor, sequence: Sequence, mask: Mask | None) -> int:
        params = sequence.params
        number = sampling.uniforms([sequence.seed], [len(sequence.ids)])  # the same as `runner.pack` gives the device
        top_k, top_p, uniform = torch.tensor([max(params.top_k, 0)]), torch.tensor([params.top_p]), torch.from_numpy(number)
        temperature = torch.tensor([params.temperature])
        if self._rule is not None:
            row = row if mask is None else sampling.masked(row, mask)
            ids, _ = neuron_sampling.sample(row[None], top_k, top_p, temperature, uniform, self._rule)
        else:
            ids = sampling.on_host(row[None], temperature, top_k, top_p, torch.tensor([params.min_p]), uniform, mask)
        return int(ids[0])
