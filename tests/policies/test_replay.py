"""Replay: every interleaving of what can happen to a choice, to some depth: delivered once, in order, and it comes to an end."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest

from rayneuron.policies.replay import Again, Effect, Fail, PassOn, Replay

TOKENS = (10, 11, 12, 13)  # what every engine says to this request
EVENTS = ("say", "hear", "late", "twice", "crash", "step", "leave", "stop", "back")


@dataclass
class World:
    """A choice and all around it. `flying`: pieces (attempt, at, end) of a token on their way; `said`: tokens of the present attempt."""

    machine: Replay = field(default_factory=lambda: Replay(3, most_strikes=9))
    taken: tuple[int, ...] = ()
    flying: tuple[tuple[int, int, bool], ...] = ()
    said: int = 0
    over: str = ""

    def key(self) -> tuple[object, ...]:
        kept = tuple(repr(getattr(self.machine, name)) for name in Replay.__slots__ if name not in ("dropped", "_due_s"))
        return kept, self.taken, self.flying, self.said, self.over

    def after(self, event: str) -> World | None:
        """What becomes of it; None where that cannot happen now."""
        made = copy.copy(self)
        made.machine = machine = copy.copy(self.machine)
        machine.ids = list(machine.ids)
        flying = list(self.flying)
        placed = machine.state == "placed"
        if event == "say" and placed and self.said < len(TOKENS):  # the engine sends a token
            made.flying = (*flying, (machine.attempt, self.said, self.said + 1 == len(TOKENS)))
            made.said += 1
        elif event in ("hear", "late", "twice") and flying:  # the first, the last, the first and once more later
            piece = flying[-1 if event == "late" else 0]
            if event != "twice":
                flying.remove(piece)
            made.flying = tuple(flying)
            attempt, at, end = piece
            made.took(machine.piece(attempt, at, TOKENS[at : at + 1], "length" if end else None), at)
        elif event in ("crash", "leave") and placed:  # what flies may still be heard
            made.took(machine.lost(machine.attempt, event), 0)  # type: ignore[arg-type]
        elif event == "step" and placed:  # a step has failed: everybody on it is told so
            made.took(machine.piece(machine.attempt, len(machine.ids), [], "error"), 0)
        elif event == "back" and placed and not self.said and not machine.ids:
            machine.back(machine.attempt)
        elif event == "stop" and not self.over:
            machine.finish()
            made.over = "stopped"
        else:
            return None
        if machine.state == "waiting":
            machine.placed()
            made.said = len(machine.ids)
        return made

    def took(self, effect: Effect, at: int) -> None:
        if effect is not None and not isinstance(effect, Again):
            assert self.over == "", "something came behind the end"
        if isinstance(effect, PassOn):
            self.taken += TOKENS[at : at + 1][effect.skip :]
            self.over = "done" if effect.ends else ""
        elif isinstance(effect, Fail):
            self.over = "failed"


def test_every_interleaving_delivers_each_token_once_and_ends() -> None:
    seen: set[tuple[object, ...]] = set()
    first = World()
    first.machine.placed()
    level = [first]
    for _ in range(8):
        following = []
        for world in level:
            for event in EVENTS:
                found = world.after(event)
                if found is None or found.key() in seen:
                    continue
                seen.add(found.key())
                following.append(found)
                assert found.taken == TOKENS[: len(found.taken)] == tuple(found.machine.ids)
                assert (found.over in ("done", "stopped")) == (found.machine.state == "done")
                assert (found.over == "failed") == (found.machine.state == "failed")
                assert found.over != "done" or found.taken == TOKENS
        level = following
    assert len(seen) > 2000
    for world in level:  # and from everywhere, where nothing more goes wrong, to the end
        for event in ("say", "hear") * 20:
            world = world.after(event) or world
        assert world.over in ("failed", "stopped") or world.taken == TOKENS


def test_what_is_lost_too_often_ends() -> None:
    world = World()
    world.machine.placed()
    for _ in range(4):
        world = world.after("crash") or world
    assert (world.over, world.machine.attempt) == ("failed", 4)


def test_a_piece_is_cut_where_it_overlaps() -> None:
    machine = Replay()
    first = machine.placed()
    assert machine.piece(first, 0, [5, 6], None) == PassOn(0, False)
    assert machine.lost(first, "leave") == Again()
    second = machine.placed()
    assert machine.piece(first, 2, [7], None) is None and machine.dropped == 1  # the old attempt, late
    assert machine.piece(second, 1, [6, 7, 8], "stop") == PassOn(1, True)
    assert machine.ids == [5, 6, 7, 8] and machine.state == "done"
    assert machine.lost(second, "crash") is None and not machine.finish()


def test_an_end_without_tokens_ends() -> None:
    machine = Replay()
    at = machine.placed()
    machine.piece(at, 0, [1, 2], None)
    assert machine.piece(at, 2, [], "stop") == PassOn(0, True)


def test_a_poison_request_ends_after_two_replicas() -> None:
    machine = Replay(limit=9)
    for said in (Again, Fail):
        attempt = machine.placed()
        machine.piece(attempt, len(machine.ids), [1, 2, 3], None)
        effect = machine.lost(attempt, "crash")
        assert isinstance(effect, said)
    assert isinstance(effect, Fail) and effect.status == 500


def test_long_innocent_streams_collect_no_strikes() -> None:
    machine = Replay(limit=9)
    for _ in range(9):
        attempt = machine.placed()
        machine.piece(attempt, len(machine.ids), list(range(20)), None)
        assert isinstance(machine.lost(attempt, "crash"), Again)
    assert machine.attempt == 9


def test_killing_at_the_same_token_again_is_a_strike_however_late() -> None:
    machine = Replay(limit=9)
    attempt = machine.placed()
    machine.piece(attempt, 0, list(range(15)), None)
    machine.lost(attempt, "crash")  # early: the first strike, at 15
    attempt = machine.placed()
    machine.piece(attempt, 0, list(range(15)), None)  # nothing new
    assert isinstance(machine.lost(attempt, "step"), Fail)


def test_replicas_that_leave_are_not_counted_and_an_end_that_nobody_asked_for_is() -> None:
    machine = Replay(limit=1)
    for _ in range(9):
        assert machine.lost(machine.placed(), "leave") == Again()
    assert machine.piece(machine.placed(), 0, [], "abort") == Again()
    assert isinstance(machine.lost(machine.placed(), "silence"), Fail)


@pytest.mark.parametrize("cause", ["silence", "gap"])
def test_what_is_nobodys_fault_is_no_strike(cause) -> None:
    machine = Replay(limit=9)
    for _ in range(9):
        assert machine.lost(machine.placed(), cause) == Again()
    assert isinstance(machine.lost(machine.placed(), cause), Fail)  # the limit


def test_what_came_back_was_no_attempt() -> None:
    machine = Replay()
    machine.back(machine.placed())
    assert machine.state == "waiting"
