"""What the host reads out of logits: the token where the device could not or must not choose it, and logprobs.

Shapes: T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from contextlib import suppress

import torch
from torch import Tensor

from rayneuron.devices import host
from rayneuron.engine import logits, neuron_sampling, sampling
from rayneuron.engine.grammar import Mask
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.engine.scores import Kept
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError


class HostSampling:
    """`commit.ReadsLogits` with torch. `rule`: as in `engine.step.step`."""

    logprobs = staticmethod(logits.logprobs)
    listed = staticmethod(logits.listed)

    def __init__(self, rule: NeuronSampling | None = None) -> None:
        self._rule = rule
        self.kept = Kept()
        self.saw = self.kept.saw

    def next_id(self, row: Tensor, sequence: Sequence, taken: int | None) -> int:
        """The same choice as the device's, after editing the row [V], over the whole vocabulary. `taken`: what that has chosen."""
        params = sequence.params
        if (token := self._fitting(sequence, taken)) is not None:
            return token
        if params.edits_logits:
            row = logits.edit(row, sequence)
        if sequence.grammar is not None:
            return self._allowed(row, sequence, sequence.grammar.mask())
        if params.greedy:
            return int(row.argmax())
        return self._draw(row, sequence, None)

    def next_ids(self, rows: Ids[Tensor], sequences: Ids[Sequence], taken: Ids[int | None]) -> list[int | None]:
        """As `commit.ReadsLogits`: what constraints allow and only the kernels have to look at."""
        told: dict[int, int] = {}
        masks: dict[int, Mask] = {}
        for i, (sequence, likeliest) in enumerate(zip(sequences, taken, strict=True)):
            if sequence.grammar is not None and not sequence.params.edits_logits and self._by_kernels(sequence):
                with suppress(Exception):  # `next_id` meets it again
                    if (token := self._fitting(sequence, likeliest)) is not None:
                        told[i] = token
                    else:
                        masks[i] = sequence.grammar.mask()
        drawn = host.draw([rows[i] for i in masks], [_how(sequences[i]) for i in masks], [*masks.values()]) if masks else None
        told |= {i: token for i, token in zip(masks, drawn or (), strict=drawn is not None) if token >= 0}
        return [told.get(i) for i in range(len(rows))]

    def candidates(self, row: Tensor, sequence: Sequence) -> list[tuple[int, float]]:
        """The likeliest, edited as transformers edits them: after the softmax."""
        told = row.double().log_softmax(-1)
        if sequence.params.edits_logits:
            told = logits.edit(told.float(), sequence).double()
        values, ids = told.topk(min(sequence.search.count, len(told)))
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def _allowed(self, row: Tensor, sequence: Sequence, mask: Mask) -> int:
        """The same choice among the ids that a constraint allows."""
        token = self._draw(row, sequence, mask)
        if token < 0:
            said = "no token is left to choose: what the output must match allows only what ids, words or n-grams forbid"
            raise RequestError(said, param=sequence.params.structured_outputs.field if sequence.params.structured_outputs else None)
        return token

    def _draw(self, row: Tensor, sequence: Sequence, mask: Mask | None) -> int:
        """-1 where a mask leaves nothing."""
        params, how = sequence.params, _how(sequence)
        if self._by_kernels(sequence):
            return sampling.on_host(row, how, mask)
        if mask is not None and (row := sampling.masked(row, mask)).max() == logits.BANNED:
            return -1
        _, top_k, _, _, uniform = how
        if self._rule is None:
            return sampling.on_host(sampling.left(row, how, params.typical_p), (1.0, 0, 1.0, 0.0, uniform))
        told = (torch.tensor([top_k]), torch.tensor([params.top_p]), torch.tensor([params.temperature]), torch.tensor([uniform]))
        ids, _ = neuron_sampling.sample(row[None], *told, self._rule)
        return int(ids[0])

    def _fitting(self, sequence: Sequence, taken: int | None) -> int | None:
        """What the device has chosen, if a constraint allows it and so chooses it too: the likeliest of all is that of the allowed ones."""
        params = sequence.params
        if taken is None or self._rule is not None or not params.greedy or params.edits_logits or sequence.grammar is None:
            return None
        return taken if sequence.grammar.takes(taken) else None

    def _by_kernels(self, sequence: Sequence) -> bool:
        """Whether `sampling.on_host` makes the choice alone."""
        return sequence.params.greedy or (self._rule is None and sequence.params.typical_p == 1.0)


def _how(sequence: Sequence) -> tuple[float, int, float, float, float]:
    """Temperature, top_k, top_p, min_p and the next position's random number: the same as `runner.pack` gives the device."""
    params = sequence.params
    uniform = 0.0 if params.greedy else float(sampling.uniforms([sequence.seed], [len(sequence.ids)])[0])
    return params.temperature, max(params.top_k, 0), params.top_p, params.min_p, uniform
