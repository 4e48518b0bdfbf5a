"""Both state machines: every cell of their tables, and both of them over a channel that loses, doubles and delays."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.transfer.tickets import ASK_S, Claim, Offer, asking, claim_step, offer_step
from tests.drawn import examples

# The offer's table, from the design: state -> event -> (next state, actions). What is not written changes nothing and asks for nothing.
LEASE = 30.0
OFFER_CELLS = {
    "queued": {
        "settled": ("running", ()),
        "ended": ("offered", ()),
        "get": ("queued", ("wait",)),
        "commit": ("queued", ("expired",)),
        "abort": ("aborted", ("drop", "ok")),
        "lost": ("aborted", ("drop",)),
        "over": ("expired", ("drop",)),
        "failed": ("aborted", ("drop",)),
    },
    "running": {
        "settled": ("running", ()),
        "ended": ("offered", ()),
        "get": ("running", ("serve",)),
        "commit": ("running", ("expired",)),
        "abort": ("aborted", ("drop", "ok")),
        "lost": ("aborted", ("drop",)),
        "over": ("expired", ("drop",)),
        "failed": ("aborted", ("drop",)),
    },
    "offered": {
        "ended": ("offered", ()),
        "get": ("offered", ("serve",)),
        "commit": ("committed", ("unpin", "committed")),
        "abort": ("aborted", ("unpin", "ok")),
        "lost": ("aborted", ("unpin",)),
        "over": ("expired", ("unpin",)),
        "failed": ("aborted", ("unpin",)),
    },
    "committed": {
        "ended": ("committed", ("unpin",)),
        "get": ("committed", ("expired",)),
        "commit": ("committed", ("committed",)),
        "abort": ("committed", ("ok",)),
    },
    "aborted": {
        "ended": ("aborted", ("unpin",)),
        "get": ("aborted", ("expired",)),
        "commit": ("aborted", ("expired",)),
        "abort": ("aborted", ("ok",)),
    },
    "expired": {
        "ended": ("expired", ("unpin",)),
        "get": ("expired", ("expired",)),
        "commit": ("expired", ("expired",)),
        "abort": ("expired", ("ok",)),
    },
}
OFFER_EVENTS = ("settled", "ended", "get", "commit", "abort", "lost", "beat", "tick", "failed", "drain")


@pytest.mark.parametrize("phase", OFFER_CELLS)
@pytest.mark.parametrize("event", [*OFFER_EVENTS, "over"])
def test_every_cell_of_the_offers_table(phase: str, event: str) -> None:
    now = LEASE if event == "over" else LEASE - 1
    made, actions = offer_step(Offer(LEASE, phase, 64), "tick" if event == "over" else event, now, 128)
    assert (made.phase, actions) == OFFER_CELLS[phase].get(event, (phase, ()))
    grew = event == "settled" and phase in ("queued", "running")
    assert made.settled == (128 if grew else 64)
    renewed = event == "beat" and phase in ("queued", "running", "offered")
    assert made.until == (LEASE - 1 + 128 if renewed else LEASE)


@pytest.mark.parametrize("event", OFFER_EVENTS)
@pytest.mark.parametrize(("phase", "taken_back"), [("queued", "drop"), ("running", "drop"), ("offered", "unpin")])
def test_what_comes_after_the_lease_has_come_too_late(event: str, phase: str, taken_back: str) -> None:
    made, actions = offer_step(Offer(LEASE, phase), event, LEASE, 20)
    assert made == Offer(LEASE, "expired")
    answer = {"get": ("expired",), "commit": ("expired",), "abort": ("ok",), "ended": ("unpin",)}.get(event, ())
    assert actions == (taken_back, *answer)


def test_a_lease_never_shrinks_and_a_watermark_neither() -> None:
    assert offer_step(Offer(LEASE), "beat", 5.0, 20.0)[0].until == LEASE
    assert offer_step(Offer(LEASE, "running", 64), "settled", 5.0, 32)[0].settled == 64


STALL, NOW = 5.0, 100.0
BASE = {
    "asked": Claim(100, 32, NOW + 1, pulled=32),
    "pulling": Claim(100, 32, NOW + 1, "pulling", settled=64, pulled=64),
    "writing": Claim(100, 32, NOW + 1, "pulling", settled=64, pulled=32, busy=True),
    "streamed": Claim(100, 32, NOW + 1, "pulling", settled=100, pulled=64, streamed=True, busy=True),
    "last": Claim(100, 32, NOW + 1, "pulling", settled=100, pulled=100),
    "committing": Claim(100, 32, NOW + 1, "committing", settled=100, pulled=100, streamed=True),
    "ending": Claim(100, 32, NOW + 1, "ending", settled=100, pulled=64, streamed=True, busy=True),
    "turning": Claim(100, 32, NOW + 1, "ending", settled=64, pulled=32, busy=True, ends="next"),
    "adopted": Claim(100, 32, NOW + 1, "adopted", settled=100, pulled=100, streamed=True),
    "failed": Claim(100, 32, NOW + 1, "failed", settled=64, pulled=32),
}
FAIL, GONE = ("failed", ("fail",)), ("failed", ("abandon", "fail"))
STOPPING, STOPPED = ("ending", ("stop",)), ("ending", ("abandon", "stop"))
# State -> event -> (next phase, actions), with nobody else to ask; "over": its wait is over. What is not written changes nothing.
FETCH_CELLS = {
    "asked": {"accepted": ("pulling", ()), "declined": FAIL, "lost": FAIL, "over": GONE, "cancel": GONE},
    "pulling": {
        "watermark": ("pulling", ("pull",)),
        "first": ("pulling", ("give",)),
        "expired": FAIL,
        "lost": FAIL,
        "over": GONE,
        "cancel": GONE,
    },
    "writing": {
        "first": ("pulling", ("give",)),
        "pulled": ("pulling", ()),
        "broken": ("pulling", ("pull",)),
        "stale": GONE,
        "expired": STOPPING,
        "lost": STOPPING,
        "over": STOPPED,
        "cancel": STOPPED,
    },
    "streamed": {
        "pulled": ("committing", ("commit",)),
        "broken": ("pulling", ("pull",)),
        "stale": GONE,
        "expired": STOPPING,
        "lost": STOPPING,
        "over": STOPPED,
        "cancel": STOPPED,
    },
    "last": {
        "first": ("committing", ("give", "commit")),
        "expired": FAIL,
        "lost": FAIL,
        "over": GONE,
        "cancel": GONE,
    },
    "committing": {"committed": ("adopted", ("adopt",)), "expired": FAIL, "lost": FAIL, "over": GONE, "cancel": GONE},
    "ending": {"pulled": FAIL, "broken": FAIL, "stale": FAIL},
    "turning": {"pulled": ("asked", ("next",)), "broken": ("asked", ("next",)), "stale": ("asked", ("next",))},
    "adopted": {},
    "failed": {},
}
FETCH_EVENTS = (
    *("accepted", "declined", "watermark", "first", "pulled", "broken", "stale", "committed", "expired", "lost", "beat", "tick", "cancel"),
    "over",
)
VALUES = {"watermark": 100, "pulled": 64}


@pytest.mark.parametrize("name", BASE)
@pytest.mark.parametrize("event", FETCH_EVENTS)
def test_every_cell_of_the_fetchs_table(name: str, event: str) -> None:
    start = BASE[name]
    value = 100 if (name, event) == ("streamed", "pulled") else VALUES.get(event, 0)
    now = NOW + 1 if event == "over" else NOW
    made, actions = claim_step(start, "tick" if event == "over" else event, now, STALL, value)
    assert (made.phase, actions) == FETCH_CELLS[name].get(event, (start.phase, ()))
    assert ("fail" in actions) == (made.phase == "failed" and start.phase != "failed")
    if made.phase in ("failed", "asked", "committing", "adopted"):
        assert not made.busy, "its blocks go to others, or count: nobody may write them"
    beat = event == "beat" and (start.busy or start.settled < start.total and not start.streamed)
    spoke = beat or event in ("watermark", "first") or (event in ("pulled", "broken") and start.busy) or start.phase == "asked"
    if made.phase == "pulling" and spoke:
        assert made.until == NOW + STALL, "whoever says something is not stalled"
    if made.phase == "committing" and start.phase != "committing":
        assert made.until == NOW + ASK_S


@pytest.mark.parametrize(
    ("name", "event"),
    [
        *((name, event) for name in ("asked", "pulling", "writing", "last") for event in ("lost", "over")),
        *((name, "expired") for name in ("pulling", "writing", "last")),
        ("asked", "declined"),
        ("writing", "stale"),
    ],
)
def test_before_a_token_has_gone_out_somebody_else_is_asked_once(name: str, event: str) -> None:
    now = NOW + 1 if event == "over" else NOW
    made, actions = claim_step(BASE[name], "tick" if event == "over" else event, now, STALL, other=True)
    if made.phase == "ending":
        made, actions = claim_step(made, "broken", now, STALL)
    assert made == replace(asking(100, 32, now), tries=2) and actions[-1] == "next", "what the first one gave is pulled anew"
    once = claim_step(replace(BASE[name], tries=2), "tick" if event == "over" else event, now, STALL, other=True)[0]
    assert once.phase == "failed" or (once.phase == "ending" and once.ends == "fail")


def test_after_a_token_has_gone_out_nobody_else_is_asked() -> None:
    for event in ("lost", "expired"):
        assert claim_step(replace(BASE["last"], streamed=True), event, NOW, STALL, other=True)[0].phase == "failed"
    assert claim_step(BASE["streamed"], "stale", NOW, STALL, other=True)[0].phase == "failed"


def test_a_second_failure_of_the_same_ticket_ends_it() -> None:
    made, actions = claim_step(replace(BASE["writing"], again=True), "broken", NOW, STALL)
    assert (made.phase, actions) == GONE


def test_who_is_cancelled_while_turning_to_somebody_else_ends() -> None:
    made, _ = claim_step(BASE["turning"], "cancel", NOW, STALL)
    assert claim_step(made, "broken", NOW, STALL)[0].phase == "failed"


@pytest.mark.parametrize("waiting", [{"streamed": True}, {"settled": 100, "pulled": 100}])
def test_who_has_computed_all_cannot_be_alive_and_say_nothing_more(waiting) -> None:
    """A watermark or the tokens were lost: that the other side lives does not help."""
    start = replace(BASE["pulling"], **waiting)
    assert claim_step(start, "beat", NOW, STALL) == (start, ())
    assert claim_step(replace(start, busy=True), "beat", NOW, STALL)[0].until == NOW + STALL


def test_where_both_last_words_are_lost_the_beat_ends_the_wait() -> None:
    """The other side lives for ever, and has said neither its last watermark nor its tokens; the beat says where it is."""
    made, actions = claim_step(BASE["pulling"], "beat", NOW, STALL, 100)
    assert actions == ("pull",) and made.settled == 100
    made, actions = claim_step(made, "pulled", NOW + 1, STALL, 100)
    assert claim_step(made, "beat", NOW + 2, STALL, 100) == (made, ()) and made.until == NOW + 1 + STALL


def test_tokens_are_given_once() -> None:
    made, actions = claim_step(BASE["streamed"], "first", NOW, STALL)
    assert actions == () and made.streamed


# Both together, over a channel that loses, doubles and delays, on a clock that jumps from event to event.

BLOCK, TICK = 16, 1.0


@dataclass
class World:
    """One request between P and D. P's blocks have a version, which rises when their room is used anew; D's have who may write them."""

    draws: st.DataObject
    total: int
    lease: float
    now: float = 0.0
    order: int = 0
    queue: list = field(default_factory=list)
    offer: Offer | None = None
    computed: int = 0
    whole: float = 0.0  # when all was
    pinned: bool = False  # P's blocks are held for the ticket, by the job or by the pin
    version: int = 0
    fetch: Claim = None  # type: ignore[assignment]
    copied: dict = field(default_factory=dict)  # block of the ticket: version it had when it was read
    writing: bool = False
    outcome: str = ""
    freed: bool = False  # D's blocks
    given: int = 0
    told: float = 0.0  # when D last sent a beat

    def at(self, delay: float, what, *args) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + delay, self.order, what, args))

    def send(self, what, *args) -> None:
        """A message: lost, doubled, late."""
        for _ in range(self.draws.draw(st.sampled_from([0, 1, 1, 1, 1, 1, 1, 2]))):
            self.at(self.draws.draw(st.sampled_from([0.0, 0.01, 0.01, 0.3, 2.0, 12.0])), what, *args)

    # P

    def p_ask(self) -> None:
        if self.offer is None:  # asked twice: one job
            self.offer, self.pinned = Offer(self.now + self.lease), True
            self.at(0.1, self.p_step)
        self.send(self.d, "accepted")

    def p_step(self) -> None:
        if self.offer.phase in ("aborted", "expired", "committed"):
            return
        self.computed = min(self.total, self.computed + 32)
        self.p("settled", self.computed)
        self.send(self.d, "watermark", self.computed if self.computed == self.total else self.computed // BLOCK * BLOCK)
        if self.computed == self.total:
            self.whole = self.now
            self.p("ended")
            self.send(self.d, "first")
        else:
            self.at(self.draws.draw(st.sampled_from([0.1, 0.1, 1.0, 7.0])), self.p_step)

    def p(self, event, value=0) -> None:
        if self.offer is None:
            if event == "commit":
                self.send(self.d, "expired")
            return
        before = self.offer.phase
        self.offer, actions = offer_step(self.offer, event, self.now, value)
        for action in actions:
            if action in ("drop", "unpin"):
                assert self.pinned or before in ("committed", "aborted", "expired"), "given back twice"
                self.pinned = False
                self.version += 1  # somebody else computes there at once
            elif action in ("committed", "expired") and event == "commit":
                assert action == "expired" or self.offer.phase == "committed"
                self.send(self.d, action)

    def p_beat(self) -> None:
        self.p("beat", self.lease * 2 / 3)
        if self.offer is not None and self.offer.phase in ("queued", "running", "offered"):
            self.send(self.d, "beat", self.offer.settled)
        else:
            self.send(self.d, "expired")

    def p_tick(self) -> None:
        self.p("tick")
        self.at(TICK, self.p_tick)

    # D

    def d(self, event, value=0) -> None:
        before = self.fetch
        self.fetch, actions = claim_step(self.fetch, event, self.now, STALL, value)
        for action in actions:
            if action == "give":
                self.given += 1
            elif action == "pull":
                assert not self.writing, "two threads for the same blocks"
                self.writing = True
                self.at(self.draws.draw(st.sampled_from([0.0, 0.05, 3.0])), self.read, before.pulled, self.fetch.settled)
            elif action == "stop":
                pass  # a thread notices when it notices
            elif action == "commit":
                self.send(self.p, "commit")
            elif action == "abandon":
                self.send(self.p, "abort")
            elif action == "adopt":
                blocks = -(-self.total // BLOCK)
                assert self.committed_version is not None and set(self.copied) >= set(range(blocks))
                assert {self.copied[b] for b in range(blocks)} == {0}, "KV of somebody else was adopted"
                self.outcome = "adopted"
            elif action == "fail":
                assert not self.writing, "the engine may use blocks that a thread still writes"
                self.outcome, self.freed = "failed", True

    committed_version = 0

    def read(self, first, end) -> None:
        """The thread has read: P's memory as it is now, whoever it belongs to by now."""
        assert not self.freed, "a block of somebody else was written"
        self.writing = False
        if self.draws.draw(st.sampled_from([True] * 6 + [False])):
            for block in range(first // BLOCK, -(-end // BLOCK)):
                self.copied[block] = self.version
            self.d("pulled", end)
        else:
            self.d("broken")

    def d_tick(self) -> None:
        self.d("tick")
        if self.fetch.phase not in ("adopted", "failed"):
            if self.now >= self.told + self.lease / 6:
                self.told = self.now
                self.send(self.p_beat)
            self.at(TICK, self.d_tick)


@examples(120)
@given(st.data())
def test_no_order_of_events_adopts_what_is_not_owned_or_leaves_anything_behind(data: st.DataObject) -> None:
    total = data.draw(st.sampled_from([1, 15, 16, 17, 64, 100]))
    world = World(data, total, lease=data.draw(st.sampled_from([2.0, 6.0, 30.0])))
    world.fetch = asking(total, 0, 0.0)
    world.send(world.p_ask)
    world.at(0.0, world.p_tick)
    world.at(0.0, world.d_tick)
    if data.draw(st.booleans()):
        world.at(data.draw(st.sampled_from([0.0, 0.2, 1.5, 9.0])), world.d, "cancel")
    if data.draw(st.integers(0, 3)) == 0:  # the channel breaks, and each side is told when it is told
        world.at(data.draw(st.sampled_from([0.1, 1.5, 9.0])), world.d, "lost")
        world.at(data.draw(st.sampled_from([0.1, 1.5, 9.0])), world.p, "lost")
    silence = None
    while world.queue and world.now < 600:
        at, _, what, args = heapq.heappop(world.queue)
        world.now = at
        what(*args)
        over = world.fetch.phase in ("adopted", "failed")
        if over and silence is None:
            # What was said last comes 12 s later at most; then a pull and its repetition, a stall each, and the commit.
            assert not world.whole or world.now <= world.whole + 12 + 2 * (3 + STALL) + ASK_S + 3 * TICK, "it took too long"
            silence = world.now + 12.0  # the longest a beat may still be on its way
        if over and world.now > silence + world.lease + TICK:
            break
    assert world.outcome in ("adopted", "failed"), "it never ends"
    assert world.given <= 1
    assert not world.pinned, "blocks are pinned for nobody"
    assert world.offer is None or world.offer.phase in ("committed", "aborted", "expired")


def test_without_any_loss_it_is_adopted() -> None:
    """The control of the test above: it can end well."""
    now, fetch = 0.0, asking(40, 0, 0.0)
    offer = Offer(30.0)
    seen = []
    for event, value in (("accepted", 0), ("watermark", 32), ("watermark", 40), ("pulled", 32), ("first", 0), ("pulled", 40)):
        fetch, actions = claim_step(fetch, event, now, STALL, value)
        seen += actions
    offer, _ = offer_step(offer, "settled", now, 40)
    offer, _ = offer_step(offer, "ended", now)
    offer, answer = offer_step(offer, "commit", now)
    fetch, actions = claim_step(fetch, answer[-1], now, STALL)
    assert seen == ["pull", "pull", "give", "commit"] and actions == ("adopt",) and answer == ("unpin", "committed")
