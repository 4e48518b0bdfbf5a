"""Waiting and running sequences to the plan of the next step: chunks of prefill alternate with decode steps."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from rayneuron import hashing
from rayneuron.engine.adapters import Adapters
from rayneuron.engine.beams import Search
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity, pack_prefill
from rayneuron.engine.forks import Forks
from rayneuron.engine.hold import Hold
from rayneuron.engine.kv_events import KvLog
from rayneuron.engine.remote import Lent, Prefill, Prefills
from rayneuron.engine.sequence import Plan, Sequence, Work, begins_alike, shareable, wants_scores
from rayneuron.engine.speculation.drafting import Speculation
from rayneuron.policies.chunks import Chunks

_RANK = attrgetter("rank")


class Scheduler:
    """Decides who runs. No torch, no clock, no I/O; every admitted sequence fits alone, so service in order never starves one.

    `model`: its fingerprint, where blocks of equal prefixes are computed once (`caching`). `chunks`: how much of a prompt one step computes
    while others decode; None: all that fits the shapes. `blocks`: None: its own. `prefills`: others who compute prompts.
    """

    def __init__(
        self, capacity: Capacity, model: str | None = None, chunks: Chunks | None = None, speculation: Speculation | None = None,
        adapters: Adapters | None = None, blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        self.capacity = capacity
        self.speculation = speculation
        self.adapters = adapters or Adapters()
        self.chunks = chunks
        self.model, self.caching = model, model is not None
        self.blocks = blocks or Blocks(capacity.space, KvLog() if self.caching else None)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # both in order of service
        self.forks = Forks(self.blocks, self.adapters, self.running)
        self.prefills: Prefills | None = None
        self.remote: dict[str, tuple[Hold, Sequence | None]] = {}  # by key: what others may write, and whose it is; None: who has ended
        self.waiting_tokens = self.preemptions = 0  # prompt tokens of `waiting`, preempted sequences with all their tokens
        self._fresh: set[Sequence] = set()  # who runs and has had no step yet
        self._prefilled_last = False
        self._under_way: Plan | None = None  # the step begun last, until it has ended
        self._short: Sequence | None = None  # the first who waits for room that others give back with the step under way

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence at its place by priority and arrival."""
        sequence.phase = "waiting"
        insort(self.waiting, sequence, key=_RANK)
        self.waiting_tokens += sequence.remaining

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting, running or remote, and free what it holds, unless others may still write there."""
        self._fresh.discard(sequence)
        if sequence.phase == "remote":
            assert self.prefills is not None and sequence.hold is not None
            self.remote[sequence.asked], sequence.hold = (sequence.hold, None), None
            self.prefills.cancel(sequence.asked)
            self.adapters.leave(sequence)
        elif sequence.search is not None and sequence.search.running:
            self.forks.disband(sequence.search)
        elif sequence.hold is not None:
            self.forks.release(sequence)
        else:
            self.waiting.remove(sequence)
            self.waiting_tokens -= sequence.remaining

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        if self.waiting:
            self._admit()
        prefills = [s for s in self.running if s.phase == "prefill"]
        if prefills and not (self._prefilled_last and any(s.phase == "decode" for s in self.running)):
            if works := self._chunks(prefills):  # none where all that was left has been found in the cache
                self._prefilled_last = True
                return self._begins(Plan("prefill", works, self.blocks.copies(), self.adapters.installs()))
        self._prefilled_last, before = False, self.preemptions
        if works := self._grow():
            plan = self._begins(Plan("decode", works, self.blocks.copies(), self.adapters.installs()))
            return plan if self.speculation is None else self.speculation.draft(plan, self.blocks)
        # where growing has preempted all who decode, others can be served now; else nobody is there, or waits for the step under way
        return self.plan() if self.preemptions > before else None

    def _begins(self, plan: Plan) -> Plan:
        if self._fresh:
            plan.begins = [work.sequence for work in plan.works if work.sequence in self._fresh]
            self._fresh.difference_update(plan.begins)
        return plan

    def launch(self, plan: Plan, overlaps: bool) -> None:
        """A step has begun: its KV counts as computed. `overlaps`: what the device knows itself of the next token may be planned already.

        Not known to the device: a token that the host edits, or samples from the scores of a prompt; not wanted: one after the last.
        """
        self.blocks.begin()
        self.adapters.installed()
        self._under_way = plan
        hidden = not overlaps or (plan.tag == "prefill" and wants_scores(plan.works[0].sequence))
        for work in plan.works:
            sequence = work.sequence
            if not hidden and work.last and not sequence.edited:
                work.followed = sequence.generated + sequence.unseen + 1 < sequence.max_tokens
                sequence.unseen += work.followed
            sequence.run(work.start + work.count)

    def landed(self, plan: Plan) -> None:
        """The step that has been under way longest, this plan's, has ended: its KV is there, and blocks freed meanwhile can be used."""
        self.blocks.end()
        if self._under_way is plan:
            self._under_way = None
        size = self.capacity.block
        for work in plan.works:
            if work.valid:
                sequence, settled = work.sequence, work.start + work.count
                sequence.settled, hold = settled, sequence.hold
                if hold is not None and self.caching and settled // size > hold.shared:
                    self._settle(sequence, hold)
                if hold is not None and sequence.loan is not None and sequence.leader is None:
                    sure = settled if settled == sequence.prompt_len else settled // size * size
                    blocks = tuple(hold.blocks[: self.capacity.space.width(sure)])
                    sequence.loan.told(Lent(sequence.loan.ticket, sure, blocks))
        if self.blocks.log is not None and self.blocks.log.open:
            self.blocks.log.flush()

    def _settle(self, sequence: Sequence, hold: Hold) -> None:
        known = sequence.settled // self.capacity.block
        self.blocks.settle(hold, self._hashes(sequence)[:known], self._root(sequence), sequence.ids)

    def lend(self, sequence: Sequence) -> None:
        """A sequence that was computed for somebody else has ended: what it holds belongs to its ticket."""
        assert sequence.hold is not None and sequence.loan is not None
        self.running.remove(sequence)
        self.adapters.leave(sequence)
        self.blocks.pin(sequence.hold, sequence.loan.ticket, sequence.prompt_len)

    def inherit(self, sequence: Sequence, heir: Sequence) -> None:
        """Another choice of a request takes the place of the one whose prompt another pool computes."""
        assert sequence.hold is not None
        heir.phase, heir.hold, heir.asked, heir.leader = "remote", sequence.hold, sequence.asked, None
        heir.computed, heir.cached, sequence.hold = sequence.computed, sequence.cached, None
        self.remote[heir.asked] = heir.hold, heir

    def arrived(self, key: str, whole: bool) -> Sequence | None:
        """Nobody else writes these blocks any more; they hold the whole prompt, or only what was there before. Who goes on with them."""
        hold, sequence = self.remote.pop(key)
        if sequence is None:
            self.blocks.release(hold)
            return None
        if whole:
            sequence.settled = sequence.prompt_len
            self._settle(sequence, hold)
        sequence.run(min(sequence.prompt_len, len(sequence.ids) - 1) if whole else sequence.computed)
        insort(self.running, sequence, key=_RANK)
        self._fresh.add(sequence)
        return sequence

    def _asks(self, sequence: Sequence, hold: Hold, hashes: list[bytes] | tuple[()], prefills: Prefills) -> bool:
        """Whether another pool computes a prompt that has just been given its blocks. All who wait so hold at most half of them, so that
        who runs and grows finds room."""
        prompt, here = sequence.prompt_len, sequence.search or sequence.loan or sequence.generated or sequence.preemptions
        if here or not sequence.max_tokens:
            return False
        held = sum(len(other.blocks) for other, _ in self.remote.values())
        if hold.known >= prompt - 1 or held + len(hold.blocks) > self.capacity.blocks // 2:
            prefills.kept("cached" if hold.known >= prompt - 1 else "room")
            return False
        key = f"{sequence.request.id}/{sequence.order}"
        blocks = tuple(hold.blocks[: self.capacity.space.width(prompt)])
        if not prefills.ask(Prefill(key, sequence.request, hold.known, blocks, hashes)):
            return False
        sequence.phase, sequence.asked = "remote", key
        self.remote[key] = hold, sequence
        return True

    def _admit(self) -> None:
        while self.waiting and (head := self.adapters.first(self.waiting)) is not None:
            if self._short is not None and self._short.hold is not None and head.rank > self._short.rank:
                break  # else it takes that room, and is preempted for it again, for ever
            reads = self.caching and not (head.whole or wants_scores(head))
            hashes = self._hashes(head) if reads else ()
            most = min(len(head.ids) + 1, head.prompt_len + head.max_tokens)
            search = head.search
            hold = self.blocks.admit(most, hashes, *shareable(head)) if search is None or self.forks.seats(search) else None
            if hold is None:
                victim = self._victim()
                if victim is None or victim.request.priority <= head.request.priority:
                    break
                self._preempt(victim)
                continue
            self.waiting.remove(head)
            self.waiting_tokens -= head.remaining
            head.hold = hold
            if search is not None:
                self.forks.reserve(search)
            self.adapters.seat(head)
            head.skip_to(hold.known)
            if self.prefills is None or not self._asks(head, hold, hashes, self.prefills):
                if reads and begins_alike(head, self.blocks, self._root):
                    head.skip_to(hold.known)
                insort(self.running, head, key=_RANK)
                self._fresh.add(head)

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """Of all full blocks of its ids, whether or not they have KV."""
        if self.caching and len(sequence.ids) // self.capacity.block > len(sequence.hashes):
            sequence.hashes = hashing.chain(sequence.ids, self.capacity.block, self._root(sequence), sequence.hashes)
        return sequence.hashes

    def _root(self, sequence: Sequence) -> bytes:
        return hashing.root(self.model or "", sequence.request.adapter or "", sequence.request.cache_salt)

    def _chunks(self, prefills: list[Sequence]) -> list[Work]:
        """What a prefill step computes: the next ids of the first in order, and of some behind it. A block is filled by one of them: the
        others wait for it, and take it."""
        size, works = self.capacity.block, self._under_way.works if self._under_way is not None else ()
        filling = {h: w.sequence for w in works if (h := w.sequence.named(w.start // size)) is not None} if works else {}
        alike: list[Sequence] = []
        for sequence in prefills:
            if alike and (sequence.request.pooling is None) != (alike[0].request.pooling is None):
                continue
            if wants_scores(sequence):
                if not alike:
                    most = min(self.capacity.scores, self._most([sequence]))
                    return [Work.of(sequence, sequence.computed, min(sequence.remaining, most))]
                continue
            hold = sequence.hold
            if hold is not None and not sequence.whole and (found := self.blocks.rematch(hold, sequence.hashes)) > sequence.computed:
                sequence.skip_to(found)
            digest = sequence.named(sequence.computed // size)
            if sequence.phase == "prefill" and (digest is None or filling.setdefault(digest, sequence) is sequence):
                alike.append(sequence)
                if len(alike) == self.capacity.prefill_rows[-1]:
                    break
        counts = pack_prefill(self.capacity, [s.remaining for s in alike], self._most(alike)) if alike else []
        return [Work.of(s, s.computed, n) for s, n in zip(alike, counts, strict=False)]

    def _most(self, prefills: list[Sequence]) -> int:
        """New tokens of a prefill step: those who decode wait for it no longer than they are asked to."""
        if self.chunks is None or not any([s.phase in ("decode", "due") for s in self.running]):
            return self.capacity.chunk
        return self.chunks.most(max(s.computed for s in prefills))

    def _grow(self) -> list[Work]:
        """A token more for all that decode, in order of service; the last in order makes room for those before it."""
        size, works, self._short = self.capacity.block, [], None
        stuck = [each for each in [*self.forks.pending] if not self._room(each.beams[0].sequence, None, each)]
        for sequence in [s for s in self.running if s.phase == "decode"]:
            hold, start = sequence.hold, sequence.computed
            if hold is not None and (start < len(hold.blocks) * size or self._room(sequence, hold)):
                works.append(Work(sequence, start, 1, True, sequence.epoch))
            elif sequence.search is not None:
                stuck.append(sequence.search)
        return [work for work in works if work.sequence.search not in stuck] if stuck else works

    def _room(self, sequence: Sequence, hold: Hold | None, search: Search | None = None) -> bool:
        while not (self.blocks.extend(hold, sequence.length) if hold is not None else search is None or self.forks.split(search)):
            if self.blocks.limbo:
                self._short = min(self._short or sequence, sequence, key=_RANK)
                return False
            victim = self._victim()
            assert victim is not None  # a loan never grows
            self._preempt(victim)
            if sequence.hold is None:
                return False
        return True

    def _victim(self) -> Sequence | None:
        """The last in order of service, of those that may be preempted."""
        return next((s for s in reversed(self.running) if s.loan is None), None)

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue, at its old place; its KV is recomputed when its turn comes."""
        if victim.search is not None:
            victim = self.forks.disband(victim.search)
        else:
            self.forks.release(victim)
        victim.rewind(0)
        if victim.prompt_logprobs is not None:
            victim.prompt_logprobs = [None]  # they are computed again with the prompt
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)

    def check(self) -> None:
        """Raise AssertionError if a row or block is owned twice or by nobody, or a phase says what is not so."""
        holds = [s.hold for s in self.running if s.hold is not None]
        assert len(holds) == len(self.running), "a sequence runs that holds nothing"
        holds += [hold for search in {s.search for s in self.running if s.search is not None} for hold in search.spare]
        self.blocks.check([*holds, *(hold for hold, _ in self.remote.values())])
        assert all(s is None or (s.phase == "remote" and s.hold is hold and s.asked == key) for key, (hold, s) in self.remote.items())
        assert all(s.phase == ("due", "decode", "prefill")[min(s.remaining, 2)] for s in self.running), "a phase is wrong"
        assert all(s.hold is None and s.phase == "waiting" for s in self.waiting)
        assert self.waiting_tokens == sum(s.remaining for s in self.waiting)
