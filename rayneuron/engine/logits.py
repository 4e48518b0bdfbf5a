"""Host-side work on one row of logits, for the rows that ask: penalties, bans, bias, logprobs.

Shapes: V vocabulary, T prompt positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Ids

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayneuron.devices import host
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError
from rayneuron.types import SamplingParams, TokenLogprobs

Row = NDArray[np.float32]
BANNED = float("-inf")
FLOAT = np.finfo(np.float32)
LONG_LIST = 1000


def edit(logits: Tensor, sequence: Sequence) -> Tensor:
    """A copy of a row [V] with every processor of the request applied. RequestError where no token is left.

    In numpy: torch would wake threads that then spin beside the step's.
    """
    if sequence.edits is None:
        sequence.edits = Edits(sequence, EditRules(sequence.params))
    return torch.from_numpy(sequence.edits.apply(logits.numpy().copy()))


class EditRules:
    """What a request's parameters say of every step, laid out once for all prompts and choices of a call.

    Long lists become one row [V] to add: an addition reads it in order, where an index jumps for each id.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        self.banned = np.array([*params.banned_token_ids, *(p[0] for p in params.bad_words_ids if len(p) == 1)], np.int64)
        bias = params.logit_bias or {}
        self.biased, self.bias = np.array([*bias], np.int64), np.array([*bias.values()], np.float32)
        self.phrases: dict[tuple[int, ...], list[int]] = {}
        for phrase in params.bad_words_ids:
            if len(phrase) > 1:
                self.phrases.setdefault(phrase[:-1], []).append(phrase[-1])
        self.sizes = sorted({len(head) for head in self.phrases})
        self._dense: Row | None = None
        self._long = len(self.banned) + len(bias) + len(params.allowed_token_ids or ()) > LONG_LIST

    def add(self, row: Row) -> Row:
        """Biases, and what is never allowed."""
        if not self._long:
            return self._listed(row)
        if self._dense is None:
            self._dense = self._listed(np.zeros_like(row))
        row += self._dense
        return row

    def _listed(self, row: Row) -> Row:
        row[self.biased] += self.bias
        if self.allowed is not None:
            only = np.full_like(row, BANNED)
            only[self.allowed] = row[self.allowed]
            row = only
        row[self.banned] = BANNED
        return row


class Edits:
    """What one choice does to its logits. What does not change is laid out once, what grows with the text grows by its new tokens.

    Repetition penalty counts prompt and output (Keskar et al. 2019, as transformers); presence and frequency penalties
    count output only (OpenAI).
    """

    def __init__(self, sequence: Sequence, rules: EditRules) -> None:
        self._sequence, self._rules = sequence, rules
        self._known = 0  # ids counted so far
        self._ids = array("q")  # all of them
        self._seen = Counts()
        self._written = Counts()
        said = sequence.params.structured_outputs
        ends = sequence.stop_ids - sequence.eos_ids if said is not None and said.kind else sequence.stop_ids
        self._ends = np.array([*ends] if sequence.params.min_tokens else [], np.int64)  # a grammar may come to where nothing else is left

    def of(self, sequence: Sequence) -> Edits:
        """The same of another sequence of the request."""
        return Edits(sequence, self._rules)

    def apply(self, row: Row) -> Row:
        """The row, edited in place or anew."""
        params = self._sequence.params
        self._count()
        if params.repetition_penalty != 1.0:
            seen = self._seen.ids
            row[seen] = _repeated(row[seen], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._written.counts
            row[self._written.ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
        row = self._rules.add(row)
        for banned in self._bans():
            row[banned] = BANNED
        if row.max() == BANNED:
            raise RequestError("no token is left to choose: allowed and banned ids, bad words and n-grams forbid all of them")
        return row

    def _count(self) -> None:
        sequence, params = self._sequence, self._sequence.params
        fresh = sequence.ids[self._known :]
        if params.no_repeat_ngram_size:
            self._ids.extend(fresh)
        if params.repetition_penalty != 1.0:
            self._seen.add(fresh)
        if params.presence_penalty or params.frequency_penalty:
            self._written.add(fresh[max(0, sequence.prompt_len - self._known) :])
        self._known = len(sequence.ids)

    def _bans(self) -> Iterator[NDArray[np.int64] | list[int]]:
        """Ids that may not come next, by reason."""
        sequence, ids = self._sequence, self._sequence.ids
        for size in self._rules.sizes:
            yield self._rules.phrases.get(tuple(ids[len(ids) - size :]), [])
        if sequence.params.no_repeat_ngram_size:
            yield _repeats(np.frombuffer(self._ids, np.int64), sequence.params.no_repeat_ngram_size)
        if sequence.generated < sequence.params.min_tokens:
            yield self._ends


class Counts:
    """Ids and how often each came, as arrays that grow."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("q")

    def add(self, ids: Ids[int]) -> None:
        """Count some more."""
        for token in ids:
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each id once; valid until the next `add`."""
        return np.frombuffer(self._ids, np.int64)

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often, in the same order."""
        return np.frombuffer(self._counts, np.int64)


def _repeated(value: Row, penalty: float) -> Row:
    """Logits of tokens seen before. Finite whatever the penalty: an infinite one would make probabilities that are no numbers."""
    factor = np.clip(float(penalty), FLOAT.tiny, FLOAT.max).astype(np.float32)
    with np.errstate(over="ignore"):
        changed = np.where(value > 0, value / factor, value * factor)
    finite: Row = np.clip(changed, FLOAT.min, FLOAT.max)
    return finite


def _repeats(ids: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Tokens that would complete an n-gram that occurred before, in prompt or output (as transformers).

    Places where the last size - 1 ids occurred, told apart from the last id backwards: few are left after one or two.
    """
    places = np.arange(size - 1, len(ids))  # of the token after them
    for back in range(1, size):
        if not len(places):
            break
        places = places[ids[places - back] == ids[-back]]
    return ids[places]


def logprobs(rows: Ids[Tensor], tokens: Ids[int], count: int) -> list[TokenLogprobs]:
    """Log-probability of each of `tokens` under its row [V] of unedited logits, its rank, and the `count` likeliest there: all rows in one
    call of the CPU's kernels, where they are built."""
    told = host.describe(rows, tokens, count) or describe(torch.stack(list(rows)), torch.tensor(tokens), count)
    entries = zip(tokens, *(t.tolist() for t in told), strict=True)
    return [TokenLogprobs(t, p, r, tuple(zip(i, v, strict=True))) for t, p, r, i, v in entries]


def listed(row: Tensor, entry: TokenLogprobs, ids: Ids[int]) -> TokenLogprobs:
    """An entry of a row [V] with these `ids` instead of the likeliest."""
    values = row[torch.tensor(ids)].double() - float(row[entry.token_id]) + entry.logprob  # all have the same normaliser
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, tuple(zip(ids, values.tolist(), strict=True)))


def describe(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T,V], tokens [T] -> log-probability [T] and rank [T] of each, ids and log-probabilities [T,count] of the likeliest."""
    logp = logits.double().log_softmax(-1)
    own = logp.gather(1, tokens[:, None])
    values, ids = logp.topk(count, dim=-1)
    return own[:, 0], (logp > own).sum(-1) + 1, ids, values
