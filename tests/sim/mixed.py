"""An engine that mixes prefill into decode steps, as vLLM does: not ours, but what public replay figures were made with."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush

from rayneuron.sim.clock import Clock
from rayneuron.sim.workload import Arrival

BUDGET, ROWS, BLOCK, BLOCKS = 8192, 256, 512, 2048  # new tokens a step, sequences, tokens of a block, blocks


def prefill_ms(tokens: int) -> float:
    return 16.50 + 0.015183 * tokens + 4.21e-7 * tokens * tokens


def decode_ms(active: float) -> float:
    p = active / (BLOCK * BLOCKS)
    return 5.74 + 54.01 * p - 25.74 * p * p


class MixedCall:
    """A request in the engine. `left`: of its prompt; `hashes`: of all blocks of the prompt, as the trace names them."""

    __slots__ = ("arrival", "cached", "end", "first_s", "hashes", "last_s", "left")

    def __init__(self, arrival: Arrival, hashes: tuple[int, ...]) -> None:
        self.arrival, self.hashes = arrival, hashes
        self.left = self.cached = self.end = 0
        self.first_s = self.last_s = 0.0


class MixedEngine:
    """`ended` is told of every call with its last token."""

    def __init__(self, clock: Clock, ended: Callable[[MixedCall], None]) -> None:
        self.clock, self.ended = clock, ended
        self.waiting: deque[MixedCall] = deque()
        self.prefilling: list[MixedCall] = []
        self.ends: list[tuple[int, int, MixedCall]] = []  # of those who decode, by step
        self.users: dict[int, int] = {}  # of blocks that are held
        self.known: OrderedDict[int, None] = OrderedDict()  # blocks that nobody holds, the longest unused first
        self.own = 0  # tokens held that are in no named block
        self.steps = 0
        self.busy = False

    def submit(self, call: MixedCall) -> None:
        self.waiting.append(call)
        if not self.busy:
            self.step()

    @property
    def active(self) -> int:
        return BLOCK * len(self.users) + self.own

    def overlap(self, hashes: tuple[int, ...]) -> int:
        """Leading blocks that are here."""
        return next((at for at, block in enumerate(hashes) if block not in self.users and block not in self.known), len(hashes))

    def load(self, call: MixedCall) -> float:
        """In blocks, what there would be to compute and to hold if the call came here."""
        new = [call.arrival.prompt - BLOCK * self.overlap(call.hashes), *(c.left for c in self.prefilling)]
        waits = sum(c.arrival.prompt for c in self.waiting)
        return (sum(new) + waits + self.active) / BLOCK + sum(block not in self.users for block in call.hashes)

    def admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.ends) < ROWS:
            call = self.waiting[0]
            found = self.overlap(call.hashes)
            prompt = call.arrival.prompt
            if self.active + prompt - found * BLOCK > BLOCK * BLOCKS and (self.prefilling or self.ends):
                break
            self.waiting.popleft()
            call.cached = min(found * BLOCK, prompt - 1)
            call.left = prompt - call.cached
            for block in call.hashes:
                self.users[block] = self.users.get(block, 0) + 1
                self.known.pop(block, None)
            self.own += prompt - len(call.hashes) * BLOCK
            self.prefilling.append(call)

    def step(self) -> None:
        """The next one begins, if there is something to do."""
        self.admit()
        budget, tokens, done = BUDGET - len(self.ends), 0, list[MixedCall]()
        for call in self.prefilling:
            took = min(call.left, budget - tokens)
            call.left -= took
            tokens += took
            if not call.left:
                done.append(call)
            if tokens == budget:
                break
        self.busy = bool(tokens or self.ends)
        if not self.busy:
            return
        # Who gets a token pays for a decode step, the last part of a prompt too: 256 tokens alone take 26.18 ms there, 20.41 + 5.77.
        ms = (prefill_ms(tokens) if tokens else 0.0) + (decode_ms(self.active) if self.ends or done else 0.0)
        self.clock.at(self.clock.now_s + ms / 1e3, self.land, done)

    def land(self, done: list[MixedCall]) -> None:
        now_s = self.clock.now_s
        self.steps += 1
        self.own += len(self.ends)
        while self.ends and self.ends[0][0] <= self.steps:
            self.end(heappop(self.ends)[2])
        for call in done:
            call.first_s = now_s
            self.own += 1
            call.end = self.steps + call.arrival.output - 1
            if call.arrival.output == 1:
                self.end(call)
            else:
                heappush(self.ends, (call.end, call.arrival.number, call))
        if done:
            self.prefilling = [call for call in self.prefilling if call.left]
        self.step()

    def end(self, call: MixedCall) -> None:
        call.last_s = self.clock.now_s
        self.own -= call.arrival.prompt - len(call.hashes) * BLOCK + call.arrival.output
        for block in reversed(call.hashes):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.known[block] = None
        while len(self.known) + len(self.users) > BLOCKS - self.own // BLOCK and self.known:
            self.known.popitem(last=False)
        self.ended(call)
