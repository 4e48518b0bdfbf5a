"""A request on its way through replicas: what it has got so far, where it is, and what is asked of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from rayneuron.frames import Piece
from rayneuron.types import Request, Stamps, TokenDelta


@dataclass(slots=True, eq=False)
class Way:
    """A request, or one choice of it that goes on alone. `choices`: its index at the replica -> the client's; `open`: the client's indexes
    that have not ended; `output`: what each has got. `tried`: workers it has been lost on."""

    key: int
    request: Request
    choices: dict[int, int]
    open: set[int]
    output: dict[int, list[int]]
    attempt: int = 1
    worker: int | None = None
    number: int = 0
    tried: frozenset[int] = frozenset()
    begun_s: float = 0.0  # when this attempt's first tokens came
    heard: int = 0  # tokens of this attempt
    since_s: float = 0.0  # when it began to wait
    strikes: list[int] = field(default_factory=list)  # output lengths at which a replica failed under it

    def asked(self) -> Request:
        """What the next replica is asked for, under a name of its own."""
        name = f"{self.request.id}.{self.key}.{self.attempt}"
        if not self.alone:
            return replace(self.request, id=name)
        (index,) = self.choices.values()
        params = self.request.params
        output = self.output[index]
        changed = replace(params, n=1, prompt_logprobs=None if output else params.prompt_logprobs if index == 0 else None)
        seed = (self.request.seed or 0) + index
        return replace(self.request, id=name, params=changed, seed=seed, output_ids=output)

    @property
    def alone(self) -> bool:
        """Whether it is one choice that goes on by itself."""
        return self.request.params.n == 1 or self.attempt > 1

    def take(self, piece: Piece) -> TokenDelta | None:
        """A piece as the client's flight reads it, without what it has already; None where nothing of it is new. ValueError for a gap."""
        delta, index = piece.delta, self.choices[piece.delta.index]
        if index not in self.open:
            return None
        had = self.output[index]
        known = len(had) - piece.at
        if known < 0:
            raise ValueError(f"tokens {len(had)} to {piece.at} of choice {index} are missing")
        fresh = delta.token_ids[known:]
        if not fresh and delta.token_ids and delta.finish_reason is None:
            return None
        had += fresh
        self.heard += len(fresh)
        scores = delta.logprobs[known:] if delta.logprobs is not None else None
        delta.request_id, delta.index, delta.token_ids, delta.logprobs = self.request.id, index, fresh, scores
        if self.attempt > 1:
            delta.cached_tokens = 0  # of the prompt, as the client was told of it
        if delta.finish_reason is not None:
            self.open.discard(index)
        return delta

    def split(self) -> Iterator[tuple[int, list[int]]]:
        """The choices that have not ended, and what they have got."""
        return ((index, self.output[index]) for index in sorted(self.open))


def shifted(stamps: Stamps, now_s: float) -> Stamps:
    """A replica's stamps on this process's clock, by the one both know: the end."""
    behind_s = now_s - stamps.finished
    return Stamps(**{name: at + behind_s if (at := getattr(stamps, name)) else 0.0 for name in Stamps.__struct_fields__})
