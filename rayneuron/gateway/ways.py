"""A request on its way through replicas: what it has got so far, where it is, and what is asked of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from rayneuron.frames import Gain
from rayneuron.policies.replay import Effect, PassOn, Replay
from rayneuron.types import Request, Stamps, TokenDelta


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a call says of itself beside its requests. `ttft_ms`, `tpot_ms`: goals; `say`: told where each request goes, and why there."""

    account: str = ""
    session: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    say: Callable[[str], None] | None = None


@dataclass(slots=True, eq=False)
class Way:
    """A request, or one choice of it that goes on `alone`. `replays`: what each choice has got, by the client's index."""

    key: int
    request: Request
    wishes: Wishes
    replays: dict[int, Replay]
    alone: bool = False
    attempts: dict[int, int] = field(default_factory=dict)
    worker: int | None = None
    number: int = 0
    avoid: frozenset[int] = frozenset()  # workers it has been lost on
    since_s: float = 0.0  # when it began to wait
    heard: int = 0  # tokens

    @property
    def open(self) -> list[int]:
        """The choices that have not ended."""
        return [index for index, replay in self.replays.items() if replay.state in ("waiting", "placed")]

    @property
    def tokens(self) -> int:
        """The prompt, and what was generated before behind it."""
        return len(self.request.prompt_ids) + (len(self.replays[self.open[0]].ids) if self.alone and self.open else 0)

    def local(self, index: int) -> int:
        """A choice's index at the replica."""
        return 0 if self.alone else index

    def place(self, worker: int, number: int) -> None:
        """It goes to a replica, as the order of this number."""
        self.worker, self.number = worker, number
        self.attempts = {index: self.replays[index].placed() for index in self.open}

    def asked(self) -> Request:
        """What the replica is asked for, under a name of its own."""
        name = f"{self.request.id}.{self.key}.{self.number}"
        if not self.alone:
            return replace(self.request, id=name)
        (index,) = self.open
        output, params = self.replays[index].ids, self.request.params
        scores = params.prompt_logprobs if index == 0 and not output else None  # they have come with the first token
        alone = replace(params, n=1, prompt_logprobs=scores)
        return replace(self.request, id=name, params=alone, seed=(self.request.seed or 0) + index, output_ids=list(output))

    def hear(self, piece: Gain, now_s: float) -> tuple[int, TokenDelta | None, Effect]:
        """The choice a piece is of, the piece as its client reads it, where there is news in it, and what is to be done else."""
        delta, index = piece.delta, next(iter(self.replays)) if self.alone else piece.delta.index
        replay = self.replays.get(index)
        if replay is None:
            return index, None, None
        delta.request_id, delta.index = self.request.id, index
        if delta.finish_reason == "error" and delta.fault != "engine":  # of this choice alone, wherever it runs
            return index, delta if replay.finish() else None, None
        effect = replay.piece(self.attempts[index], piece.at, delta.token_ids, delta.finish_reason)
        if not isinstance(effect, PassOn):
            return index, None, effect
        if effect.skip:
            delta.token_ids = delta.token_ids[effect.skip :]
            if delta.logprobs is not None:
                delta.logprobs = delta.logprobs[effect.skip :]
        self.heard += len(delta.token_ids)
        if replay.attempt > 1:
            delta.cached_tokens = 0  # of the prompt, as the client was told of it
        if delta.stamps is not None:
            delta.stamps = shifted(delta.stamps, now_s)
        return index, delta, None


def shifted(stamps: Stamps, now_s: float) -> Stamps:
    """A replica's stamps on this process's clock, by the one both know: the end."""
    behind_s = now_s - stamps.finished
    return Stamps(**{name: at + behind_s if (at := getattr(stamps, name)) else 0.0 for name in Stamps.__struct_fields__})
