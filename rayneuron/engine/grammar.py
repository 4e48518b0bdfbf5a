"""What one choice may still say: its constraint, as far as its ids have come, and the next token's mask, made while the step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayneuron.constraints import StructuredOutputs
from rayneuron.engine.sequence import Sequence, Work
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams

BLANKS = 8  # tokens of white space there may be in front of a marker that an output begins with
STRAYS, RATE = 0.5, 0.1  # a mask is made beside the step where more of the likeliest ids than that were forbidden lately
Mask = NDArray[np.uint32]  # a bit for each id of the vocabulary, the lowest of a word first


class Matcher(Protocol):
    """A compiled constraint and what it has consumed. RequestError where its limits are hit, or a token does not fit."""

    def copy(self) -> Matcher:
        """Another one as far along."""

    def consume(self, ids: list[int]) -> None:
        """These come next."""

    def fill(self, mask: Mask) -> None:
        """Set the bits of what may come next; other threads run meanwhile."""

    def allows(self, ids: list[int]) -> int:
        """How many of these could come next, one after another."""

    def takes(self, token: int) -> bool:
        """Whether this one could come next; if so it is consumed."""

    def untake(self) -> None:
        """The last one consumed has not come."""

    def forced(self) -> list[int]:
        """Ids that come next whatever the model thinks."""


class Compiles(Protocol):
    """Makes matchers on a thread of its own: `structured.Grammars`. `wake` is called when one is done."""

    wake: Callable[[], None]

    @property
    def counts(self) -> Mapping[str, float]:
        """compile_s and mask_s: seconds; refused and ended: how often a constraint was, or an output by one."""

    def check(self, said: StructuredOutputs) -> None:
        """RequestError where nothing can be compiled here at all."""

    def begin(self, said: StructuredOutputs) -> Future[Matcher]:
        """A fresh matcher, once it is compiled; RequestError where that fails."""

    def aside(self, work: Callable[[], None]) -> Future[None]:
        """Run something beside a step."""

    def close(self) -> None:
        """End its threads."""


class Anything:
    """A matcher of what nothing is said about."""

    def copy(self) -> Matcher:
        """As the protocol's, like all here."""
        return self

    def consume(self, ids: list[int]) -> None:
        """Nothing to follow."""

    def fill(self, mask: Mask) -> None:
        """All."""
        mask[:] = ~np.uint32(0)

    def allows(self, ids: list[int]) -> int:
        """All."""
        return len(ids)

    def takes(self, token: int) -> bool:
        """Any."""
        return True

    def untake(self) -> None:
        """Nothing to follow."""

    def forced(self) -> list[int]:
        """None."""
        return []


class Grammar:
    """A matcher that follows its sequence's output, wherever that was made: nothing is ever taken back, so nothing has to be.

    In front of the marker that `said.after` names it forbids nothing but the end, or not even that where nothing comes behind it, and
    after `said.free_tokens` it forces the marker.
    """

    def __init__(self, sequence: Sequence, matcher: Matcher, said: StructuredOutputs, vocab: int) -> None:
        self._sequence, self._matcher, self._said = sequence, matcher, said
        self._known = sequence.prompt_len  # ids it has looked at
        self._free = bool(said.after)
        self._counted = None if said.begins else sequence.prompt_len  # from where tokens are, None: from nowhere yet
        self._mask = np.zeros((vocab + 31) // 32, np.uint32)
        self._full = self._bits(range(vocab)) if self._free else self._mask
        self._unended = ~self._bits(sequence.eos_ids)  # all but what ends it
        self._at = -1  # how many ids there were when the mask was made
        self._pending: Future[None] | None = None
        self._taken: int | None = None  # what the matcher has consumed beyond the ids that are known
        self._strayed = 0.0  # how many of the likeliest ids were forbidden lately
        self._asked = sequence.params.greedy and not sequence.params.edits_logits  # nearly always one id has to be looked at, and no mask

    @property
    def masks(self) -> bool:
        """Whether the next token is likely to be chosen by a mask: the first often is, and a prompt's step has the time to make it."""
        return not self._asked or self._strayed > STRAYS or not self._sequence.generated

    def begin(self, ahead: Future[None]) -> None:
        """Somebody else calls `prepare` meanwhile, and then this is done."""
        self._pending = ahead

    def prepare(self) -> None:
        """Make the mask of the next token."""
        ids, said = self._sequence.ids, self._said
        if self._at == len(ids):
            return
        self._follow()
        if not self._free:
            self._matcher.fill(self._mask)
        elif self._ends_freedom():
            self._mask[:] = self._bits([said.after[self._begun()]])
        else:
            self._mask[:] = self._full & self._unended if said.kind else self._full
        params = self._sequence.params
        unended = said.kind and (self._sequence.generated < params.min_tokens or params.ignore_eos)
        if unended and (kept := self._mask & self._unended).any():
            self._mask[:] = kept  # it may end here, and need not
        self._at = len(ids)

    def mask(self) -> Mask:
        """What may come next; valid until the next one. RequestError."""
        self._join()
        self.prepare()
        return self._mask

    def takes(self, likeliest: int) -> bool:
        """Whether the likeliest id of all may come next, and so is the choice of who takes the likeliest. RequestError."""
        self._join()
        self._follow(likeliest)
        if self._taken is not None:
            return True  # it was asked before
        if self._at == len(self._sequence.ids) or likeliest in self._sequence.eos_ids:
            self.prepare()
            fits = bool(self._mask[likeliest // 32] >> np.uint32(likeliest % 32) & np.uint32(1))
        elif self._free:
            fits = not self._ends_freedom()
        else:
            fits = self._matcher.takes(likeliest)
            self._taken = likeliest if fits else None
        self._strayed += RATE * ((not fits) - self._strayed)
        return fits

    def forced(self, most: int) -> tuple[int, ...]:
        """Up to so many ids that come next whatever the model thinks."""
        with suppress(RequestError):  # the mask meets it again
            self._join()
            self._follow()
            return () if self._free else tuple(self._matcher.forced()[:most])
        return ()

    def allowed(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """As many of these as could come next."""
        with suppress(RequestError):
            self._join()
            self._follow()
            return drafts if self._free or not drafts else drafts[: self._matcher.allows(list(drafts))]
        return ()

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _follow(self, likely: int | None = None) -> None:
        """Take in the ids that have come since. `likely`: what comes next, so that it may stay taken."""
        ids, after, begins, start = self._sequence.ids, self._said.after, self._said.begins, self._sequence.prompt_len
        while self._free and self._known < len(ids):
            self._known += 1
            self._free = self._known - len(after) < start or tuple(ids[self._known - len(after) : self._known]) != after
            if self._counted is None:
                here = self._known - len(begins) >= start and tuple(ids[self._known - len(begins) : self._known]) == begins
                self._counted = self._known if here else None
                self._free &= here or self._known - start < len(begins) + BLANKS
        if self._taken is not None and self._known < len(ids) and ids[self._known] == self._taken:
            self._known, self._taken = self._known + 1, None
        if self._taken is not None and (self._known < len(ids) or likely != self._taken):
            self._matcher.untake()
            self._taken = None
        if self._known < len(ids):
            new, self._known = ids[self._known :], len(ids)
            self._matcher.consume(new)

    def _ends_freedom(self) -> bool:
        """Whether the marker is due."""
        most, counted = self._said.free_tokens, self._counted
        return most is not None and counted is not None and len(self._sequence.ids) - counted >= most + self._begun()

    def _begun(self) -> int:
        """How many ids of the marker the output ends with."""
        output, after = self._sequence.ids[self._sequence.prompt_len :], self._said.after
        return next(n for n in range(min(len(after) - 1, len(output)), -1, -1) if tuple(output[len(output) - n :]) == after[:n])

    def _bits(self, ids: Iterable[int]) -> Mask:
        bits = np.zeros_like(self._mask)
        for token in ids:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits


class Constraining:
    """Whose constraints are being compiled (`coming`, by request), and the masks of those who run. `compiles` None: nothing is."""

    def __init__(self, compiles: Compiles | None, vocab: int) -> None:
        self._compiles, self._vocab = compiles, vocab
        self.coming: dict[str, tuple[StructuredOutputs, Future[Matcher]]] = {}

    def check(self, params: SamplingParams) -> None:
        """RequestError where a request asks for what cannot be had here."""
        if (said := params.structured_outputs) is None:
            return
        if self._compiles is None and said.kind:
            raise RequestError("this engine cannot constrain its output; leave it out", param=said.field)
        if (bad := next((token for token in (*said.after, *said.begins) if not 0 <= token < self._vocab), None)) is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary of {self._vocab}", param=said.field)
        if self._compiles is not None and said.kind:
            self._compiles.check(said)

    def waits(self, request: Request) -> bool:
        """Whether a request is not to be planned before `ready` has said so."""
        said = request.params.structured_outputs
        if said is None or request.params.max_tokens == 0 or (self._compiles is None and said.kind):
            return False
        anything: Future[Matcher] = Future()
        anything.set_result(Anything())
        self.coming[request.id] = said, self._compiles.begin(said) if self._compiles is not None and said.kind else anything
        return True

    def ready(self, requests: Mapping[str, dict[int, Sequence]]) -> Iterator[tuple[list[Sequence], Exception | None]]:
        """The choices of requests whose constraints are compiled, which they now have; or what went wrong."""
        for request_id, (said, coming) in list(self.coming.items()):
            choices = list(requests.get(request_id, {}).values())
            if choices and not coming.done():
                continue
            wrong = coming.exception() if choices else None
            for choice in choices if wrong is None else ():
                choice.grammar = Grammar(choice, coming.result().copy(), said, self._vocab)
            if choices:
                yield choices, wrong if isinstance(wrong, Exception) or wrong is None else RuntimeError(str(wrong))
            del self.coming[request_id]

    def prepare(self, works: list[Work]) -> None:
        """Make the masks of a step's rows beside it. What goes wrong there is met again, and told, by whoever asks for the mask."""
        grammars: list[Grammar] = [g for work in works if work.last and (g := work.sequence.grammar) is not None and g.masks]

        def work() -> None:
            for grammar in grammars:
                with suppress(Exception):
                    grammar.prepare()

        if grammars and self._compiles is not None:
            ahead = self._compiles.aside(work)
            for grammar in grammars:
                grammar.begin(ahead)

    @property
    def counts(self) -> Mapping[str, float]:
        """Of what compiles; for any thread."""
        return self._compiles.counts if self._compiles is not None else {}

    def close(self) -> None:
        """End what compiles."""
        if self._compiles is not None:
            self._compiles.close()

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Whom to wake once one is compiled."""
        if self._compiles is not None:
            self._compiles.wake = wake
