"""A prefill replica alone, spoken to by hand: what it promises to whoever asks, stalls, lies or leaves."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.structs import replace

from rayneuron import wire
from rayneuron.transfer.messages import (
    Abandon,
    Accepted,
    Bid,
    Commit,
    Committed,
    Declined,
    Expired,
    FirstTokens,
    FromP,
    Knock,
    Pulse,
    Watermark,
    Welcome,
)
from rayneuron.transfer.offers import LendingLimits
from tests.serve.scripted import PATIENCE_S, eventually
from tests.transfer.pair import TOKEN, Prefilling, at_baseline, open_engine
from tests.transfer.test_pools import ask, prompt
from tests.transfer.test_transports import BAD, framed

LEASE_S = 0.6


@pytest.fixture(scope="module")
def engine(tiny):
    return lambda **how: open_engine(tiny, rows=4, kv_tokens=384, cached=True, shared=True, **how)


@pytest.fixture
def opened(engine):
    with ExitStack() as stack:

        def start(lease_s: float = 30.0, **limits: Any) -> Prefilling:
            made = Prefilling(engine(), LendingLimits(lease_s=lease_s, **limits))
            stack.callback(made.close)
            return made

        yield start


class Speaking:
    """A decode replica's end of a channel."""

    def __init__(self, to: Prefilling, at: int = 0) -> None:
        self.channel: wire.Channel[Any] = wire.Channel(wire.connect(to.offers.addresses[at], PATIENCE_S), FromP, sealed=True)
        self.say(Knock(TOKEN))
        self.welcome = self.hear(Welcome)

    def say(self, message: Any) -> None:
        self.channel.send(message)

    def hear(self, kind: Any) -> Any:
        """The next of a kind; what is said between goes by."""
        while True:
            message = self.channel.receive(PATIENCE_S)
            if isinstance(message, kind):
                return message

    def offered(self, key: str, length: int = 40, **params: Any) -> bytes:
        """A ticket whose KV is all there."""
        self.say(Bid(key, ask(key, prompt(length, len(key) + length), 5, **params)))
        ticket, settled = self.hear(Accepted).ticket, 0
        while isinstance(said := self.hear(Watermark | FirstTokens | Expired), Watermark):
            settled = said.settled
        assert settled == length or isinstance(said, Expired), "of a short lease, where the machine stands still"
        return ticket


def gone(to: Prefilling) -> None:
    eventually(lambda: at_baseline(to.engine, to.loop) and not to.offers.live, PATIENCE_S, lambda: to.engine.snapshot())


def test_a_commit_is_answered_alike_however_often_it_comes(opened):
    p = opened()
    d = Speaking(p)
    ticket = d.offered("a")
    for _ in range(3):
        d.say(Commit(ticket))
        assert d.hear(Committed | Expired) == Committed(ticket)
    gone(p)
    d.say(Abandon("a", "late"))
    d.say(Commit(b"x" * 16))
    assert isinstance(d.hear(Committed | Expired), Expired)


def test_nobody_commits_the_ticket_of_another_channel(opened):
    p = opened()
    d, other = Speaking(p), Speaking(p, at=1)
    ticket = d.offered("a")
    other.say(Commit(ticket))
    assert isinstance(other.hear(Committed | Expired), Expired)
    other.say(Pulse({ticket: 0}))
    assert other.hear(Pulse).tickets == {}
    d.say(Commit(ticket))
    assert isinstance(d.hear(Committed | Expired), Committed)
    assert d.welcome.session != other.welcome.session and d.welcome.epoch == other.welcome.epoch


def test_a_pool_full_of_tickets_that_nobody_fetches_is_empty_after_the_lease(opened):
    """The engine is idle by then: what is over must not wait for a step."""
    p = opened(lease_s=LEASE_S)
    d = Speaking(p)
    tickets = [d.offered(f"r{i}", 30) for i in range(5)]
    gone(p)
    d.say(Commit(tickets[0]))
    assert isinstance(d.hear(Committed | Expired), Expired)
    assert p.offers.counts["expired"] == 5


def test_a_beat_keeps_a_ticket_alive_and_its_end_does_not(opened):
    p = opened(lease_s=LEASE_S)
    d = Speaking(p)
    for name in "abcdefgh":
        last_s, ticket = time.monotonic(), d.offered(name)
        until_s = last_s + 3 * LEASE_S
        while (now_s := time.monotonic()) < until_s:
            d.say(Pulse({ticket: 0}))
            if ticket not in d.hear(Pulse).tickets:
                assert time.monotonic() - last_s > LEASE_S / 2, "only where this machine stood still"
                break
            last_s = now_s
            threading.Event().wait(LEASE_S / 6)
        else:
            break
    else:
        raise AssertionError("no ticket was kept")
    gone(p)
    d.say(Pulse({ticket: 0}))
    assert d.hear(Pulse).tickets == {}


def test_who_hangs_up_loses_its_tickets_at_once(opened):
    p = opened()
    d, other = Speaking(p), Speaking(p)
    d.offered("a")
    kept = other.offered("b", 20)
    d.say(Bid("c", ask("c", prompt(90, 7), 5)))
    d.channel.close()
    eventually(lambda: p.offers.live == 1, PATIENCE_S)
    other.say(Commit(kept))
    assert isinstance(other.hear(Committed | Expired), Committed)
    gone(p)


def test_an_ask_that_comes_twice_is_one_job(opened):
    p = opened()
    d = Speaking(p)
    for _ in range(2):
        d.say(Bid("a", ask("a", prompt(40, 1), 5)))
    first, second = d.hear(Accepted), d.hear(Accepted)
    assert first == second and p.offers.live == 1
    d.say(Abandon("a", "enough"))
    gone(p)


def test_eight_that_ask_where_there_is_room_for_one(opened):
    """The others are told so at once, and each finds room when its turn comes."""
    p = opened(pinned=3)
    ds = [Speaking(p) for _ in range(8)]
    for i, d in enumerate(ds):
        d.say(Bid(f"r{i}", ask(f"r{i}", prompt(40, i), 5)))
    answers = [d.hear(Accepted | Declined) for d in ds]
    assert sum(isinstance(answer, Accepted) for answer in answers) == 1
    assert all("3 blocks" in answer.why for answer in answers if isinstance(answer, Declined))
    for d in ds:
        d.channel.close()
    last = Speaking(p)
    eventually(lambda: not p.offers.live, PATIENCE_S)
    last.offered("again")


def test_what_can_never_be_computed_is_declined_with_the_reason(opened):
    d = Speaking(opened())
    d.say(Bid("long", ask("long", prompt(200, 1), 5)))
    assert "200" in d.hear(Declined).why
    d.say(Bid("alien", ask("alien", [100_000], 5)))
    assert "100000" in d.hear(Declined).why.replace(",", "")
    d.offered("b")


def test_a_request_that_no_edge_would_have_let_in_ends_its_channel_alone(opened):
    """Parameters out of their range, as only somebody else's code can send them."""
    p = opened()
    d, other = Speaking(p), Speaking(p)
    wrong = ask("a", prompt(20, 1), 5)
    data = bytes(wire.frame(Bid("a", wrong))[4:])
    hot = data.replace(b"\xabtemperature\xcb" + bytes(8), b"\xabtemperature\xcb@\x45" + bytes(6))
    assert hot != data
    d.channel.send_frame(framed(hot))
    with pytest.raises(wire.Closed):
        d.hear(Accepted | Declined)
    other.offered("b")


def test_a_replica_that_drains_takes_nobody_in_and_waits_for_who_is_there(opened):
    p = opened()
    d = Speaking(p)
    ticket = d.offered("a")
    ended: list[bool] = []
    draining = threading.Thread(target=lambda: ended.append(p.offers.drain(PATIENCE_S)))
    draining.start()
    eventually(lambda: p.offers._draining, PATIENCE_S)
    d.say(Bid("b", ask("b", prompt(20, 2), 5)))
    assert "leaving" in d.hear(Declined).why
    assert draining.is_alive()
    d.say(Commit(ticket))
    assert isinstance(d.hear(Committed | Expired), Committed)
    draining.join(PATIENCE_S)
    assert ended == [True]


def test_a_deadline_counts_there_too(opened):
    p = opened()
    d = Speaking(p)
    d.say(Bid("a", ask("a", prompt(90, 1), 5), remaining_s=-1.0))
    assert d.hear(Accepted).ticket
    assert "deadline" in d.hear(Expired).why
    gone(p)


@pytest.mark.parametrize("bad", [name for name in BAD if name not in ("no knock", "unknown")])
def test_whoever_says_what_is_no_message_is_counted_and_harms_nobody(opened, bad):
    p = opened()
    with wire.connect(p.offers.addresses[1], PATIENCE_S) as connection:
        connection.settimeout(PATIENCE_S)
        connection.sendall(BAD[bad])
        try:
            while connection.recv(1 << 16):
                pass  # a welcome, where the first words were right
        except ConnectionResetError:
            pass
    if bad != "two knocks":
        eventually(lambda: p.offers.door.refused == 1, PATIENCE_S)
    Speaking(p).offered("a")


def test_sixty_cancelled_while_they_come(opened):
    """A storm of asks that nobody wants any more leaves nothing."""
    p = opened()
    d = Speaking(p)
    for i in range(60):
        d.say(Bid(f"r{i}", replace(ask(f"r{i}", prompt(60, i), 5))))
        d.say(Abandon(f"r{i}", "cancelled"))
    for _ in range(60):
        d.hear(Accepted)
    gone(p)
    assert p.offers.counts["aborted"] == 60


def test_a_prompt_that_ends_after_its_ticket_waits_for_who_reads(engine):
    """The reader of a ticket that was abandoned has not gone yet when the engine is done: its blocks stay what they are."""
    gone: list[Any] = []

    class Read:
        """A lender one of whose readers is slow to leave."""

        def __init__(self, lender: Any) -> None:
            self.lender = lender

        def withdraw(self, ticket: bytes, then: Any) -> None:
            gone.append(then)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.lender, name)

    p = Prefilling(engine(chunk=16), between=Read)
    try:
        d = Speaking(p)
        d.say(Bid("a", ask("a", prompt(90, 1), 5)))
        d.hear(Watermark)
        d.say(Abandon("a", "enough"))
        eventually(lambda: p.loop.ask(lambda engine: engine.snapshot().blocks_pinned).result() > 0, PATIENCE_S)
        eventually(lambda: p.offers._desk._inbox.empty(), PATIENCE_S)
        assert len(gone) == 1 and p.loop.ask(lambda engine: engine.snapshot().blocks_pinned).result() == 6
        gone[0]()
        eventually(lambda: at_baseline(p.engine, p.loop), PATIENCE_S)
    finally:
        p.close()


def test_what_is_over_keeps_no_prompt(opened):
    """Ten thousand tickets are remembered, so that who asks again is answered alike."""
    p = opened()
    d = Speaking(p)
    ticket = d.offered("a", logprobs=3)
    d.say(Commit(ticket))
    d.hear(Committed)
    gone(p)
    (kept,) = p.offers._tickets.values()
    assert (kept.request.prompt_ids, kept.first) == ([], {})
    d.say(Commit(ticket))
    assert isinstance(d.hear(Committed | Expired), Committed)
