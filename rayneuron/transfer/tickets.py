"""A hand-off as two state machines: the offer of who computed the KV, the fetch of who goes on with it; pure.

Each step takes a state, what has happened and the time, and says the next state and what is to be done. What was read counts only if the
offer was alive when COMMIT came. A fetch ends adopted or failed, and then nobody writes its blocks any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

OfferPhase = Literal["queued", "running", "offered", "committed", "aborted", "expired"]
OfferEvent = Literal["settled", "ended", "get", "commit", "abort", "lost", "beat", "tick", "failed", "drain"]
OfferAction = Literal["drop", "unpin", "wait", "serve", "ok", "committed", "expired"]

ClaimPhase = Literal["asked", "pulling", "committing", "ending", "adopted", "failed"]
ClaimEvent = Literal[  # the other side's words and the way to it, the thread that pulls, and here
    "accepted", "declined", "watermark", "first", "committed", "expired", "beat", "lost", "pulled", "broken", "stale", "tick", "cancel"
]  # fmt: skip
ClaimAction = Literal["give", "pull", "stop", "commit", "abandon", "adopt", "next", "fail"]

OVER = ("committed", "aborted", "expired")
ASK_S = 1.0  # within which an ask, and a commit, is answered


@dataclass(frozen=True, slots=True)
class Offer:
    """One ticket, of who computes: queued, running, offered (all is there, and pinned), or how it ended. `settled`: positions that may be
    read; `until`: when the lease is over."""

    until: float
    phase: OfferPhase = "queued"
    settled: int = 0


def offer_step(offer: Offer, event: OfferEvent, now: float, value: float = 0) -> tuple[Offer, tuple[OfferAction, ...]]:
    """What follows. `value`: of "settled" positions, of "beat" the seconds that the lease lasts from now on.

    Actions: drop the job; unpin its blocks, once nobody reads them; the answer to a get (wait, serve, expired), commit or abort.
    """
    if offer.phase not in OVER and now >= offer.until:  # the fence: whatever comes now has come too late
        ended, taken_back = _end(offer, "expired")
        return ended, taken_back + offer_step(ended, event, now)[1]
    match event:
        case "settled" if offer.phase in ("queued", "running"):
            return replace(offer, phase="running", settled=max(offer.settled, int(value))), ()
        case "ended":
            return (offer, ("unpin",)) if offer.phase in OVER else (replace(offer, phase="offered"), ())
        case "get":
            return offer, ("expired" if offer.phase in OVER else "wait" if offer.phase == "queued" else "serve",)
        case "commit":
            if offer.phase == "offered":
                return replace(offer, phase="committed"), ("unpin", "committed")
            return offer, ("committed" if offer.phase == "committed" else "expired",)
        case "beat" if offer.phase not in OVER:
            return replace(offer, until=max(offer.until, now + value)), ()
        case "abort":
            ended, taken_back = (offer, ()) if offer.phase in OVER else _end(offer, "aborted")
            return ended, (*taken_back, "ok")
        case "lost" | "failed" if offer.phase not in OVER:
            return _end(offer, "aborted")
    return offer, ()


def _end(offer: Offer, phase: OfferPhase) -> tuple[Offer, tuple[OfferAction, ...]]:
    return replace(offer, phase=phase), ("unpin" if offer.phase == "offered" else "drop",)


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's KV, of who goes on with it: asked, pulling (some other has accepted), committing, ending (a thread still writes).

    Positions: `total` of the prompt, `known` here before, `settled` there, `pulled` here. `streamed`: its first tokens are known; `busy`: a
    thread writes its blocks; `again`: a pull has been repeated; `tries`: how many were asked; `until`: how long the wait may last; `ends`:
    what comes after `ending`.
    """

    total: int
    known: int
    until: float
    phase: ClaimPhase = "asked"
    settled: int = 0
    pulled: int = 0
    streamed: bool = False
    busy: bool = False
    again: bool = False
    tries: int = 1
    ends: ClaimAction = "fail"


Claimed = tuple[Claim, tuple[ClaimAction, ...]]


def asking(total: int, known: int, now: float) -> Claim:
    """Somebody has just been asked."""
    return Claim(total, known, now + ASK_S, pulled=known)


def claim_step(fetch: Claim, event: ClaimEvent, now: float, stall_s: float, value: int = 0, *, other: bool = False) -> Claimed:
    """What follows. `value`: positions, of "watermark", "beat" and "pulled"; `other`: somebody else can be asked, and that pays.

    Actions: give the first tokens; pull from `pulled` to `settled`, which the thread answers with pulled, broken or stale; stop the thread;
    ask for COMMIT; abandon the ticket; adopt the KV; ask the next; fail, and nobody writes.
    """
    if fetch.phase in ("adopted", "failed"):
        return fetch, ()
    if fetch.phase == "ending":
        return _ending(fetch, event, now)
    match event:
        case "cancel":
            return _leave(fetch, "fail", now, "abandon")
        case "lost":
            return _leave(fetch, _otherwise(fetch, other), now)
        case "tick" if now >= fetch.until:
            return _leave(fetch, _otherwise(fetch, other), now, "abandon")
    if fetch.phase == "asked":
        if event == "accepted":
            return replace(fetch, phase="pulling", until=now + stall_s), ()
        return _leave(fetch, _otherwise(fetch, other), now) if event == "declined" else (fetch, ())
    if event == "expired":
        return _leave(fetch, _otherwise(fetch, other), now)
    if fetch.phase == "committing":
        return (replace(fetch, phase="adopted"), ("adopt",)) if event == "committed" else (fetch, ())
    return _pulling(fetch, event, now, stall_s, value, other)


def _pulling(fetch: Claim, event: ClaimEvent, now: float, stall_s: float, value: int, other: bool) -> Claimed:
    given: tuple[ClaimAction, ...] = ()
    match event:
        case "watermark":
            fetch = replace(fetch, settled=max(fetch.settled, value))
        case "first":
            given = () if fetch.streamed else ("give",)
            fetch = replace(fetch, streamed=True)
        case "pulled" if fetch.busy:
            fetch = replace(fetch, pulled=value, busy=False)
        case "broken" if fetch.busy and not fetch.again:
            fetch = replace(fetch, busy=False, again=True)
        case "broken" | "stale" if fetch.busy:
            return _leave(replace(fetch, busy=False), _otherwise(fetch, other), now, "abandon")
        case "beat" if fetch.busy or value > fetch.settled or not (fetch.streamed or fetch.settled == fetch.total):
            # what is still to come after the first tokens, or the last positions, is on its way, or lost
            fetch = replace(fetch, settled=max(fetch.settled, value))
        case _:
            return fetch, ()
    fetch = replace(fetch, until=now + stall_s)
    if fetch.busy:
        return fetch, given
    if fetch.pulled < fetch.settled:
        return replace(fetch, busy=True), (*given, "pull")
    if fetch.streamed and fetch.pulled == fetch.total:
        return replace(fetch, phase="committing", until=now + ASK_S), (*given, "commit")
    return fetch, given


def _ending(fetch: Claim, event: ClaimEvent, now: float) -> Claimed:
    if event == "cancel":
        return replace(fetch, ends="fail"), ()
    return _out(fetch, now) if event in ("pulled", "broken", "stale") else (fetch, ())


def _otherwise(fetch: Claim, other: bool) -> ClaimAction:
    """Whom to turn to: somebody else, once, and only while no token has gone out; else the KV is computed here."""
    return "next" if other and fetch.tries == 1 and not fetch.streamed else "fail"


def _leave(fetch: Claim, ends: ClaimAction, now: float, *told: ClaimAction) -> Claimed:
    """Away from this ticket, once no thread writes."""
    fetch = replace(fetch, ends=ends)
    if fetch.busy:
        return replace(fetch, phase="ending"), (*told, "stop")
    left, actions = _out(fetch, now)
    return left, told + actions


def _out(fetch: Claim, now: float) -> Claimed:
    if fetch.ends == "next":  # what was pulled from the one before nobody has committed
        return replace(asking(fetch.total, fetch.known, now), tries=fetch.tries + 1), ("next",)
    return replace(fetch, phase="failed", busy=False), ("fail",)
