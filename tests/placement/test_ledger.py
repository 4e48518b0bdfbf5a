"""The core ledger over real processes: exclusive, aligned, freed by death, honest about who holds what."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayneuron.errors import Busy, ConfigError
from rayneuron.placement import records
from rayneuron.placement.instances import declared, instance
from rayneuron.placement.ledger import Ledger
from rayneuron.placement.records import Holder
from rayneuron.processes import process_started
from tests.placement.owners import Owner
from tests.serve.scripted import eventually

INF2 = instance("inf2.48xlarge")
ALL = frozenset(range(24))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "node", INF2)


@pytest.fixture
def strays() -> Iterator[list[int]]:
    """Pids to kill at the end, whatever happens."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_grants_of_one_process_exclude_each_other(ledger: Ledger) -> None:
    first, second, third = ledger.take(8, "a"), ledger.take(8, "b"), ledger.take(8, "c")
    assert [g.cores for g in (first, second, third)] == [tuple(range(at, at + 8)) for at in (0, 8, 16)]
    assert ledger.free() == frozenset()
    second.release()
    assert ledger.free() == set(range(8, 16))
    with ledger.take(4, "d") as fourth:
        assert fourth.cores == (8, 9, 10, 11)
    second.release()  # twice is once
    assert ledger.free() == set(range(8, 16))
    first.release(), third.release()
    assert ledger.free() == ALL and ledger.holders() == []


def test_closing_another_descriptor_of_the_file_frees_nothing(ledger: Ledger) -> None:
    grant = ledger.take(8, "a")
    with open(ledger.directory / "cores.lock", "rb"):
        pass  # classic record locks would be gone now
    assert ledger.free() == ALL - set(grant.cores)
    grant.release()


def test_refusal_names_wanted_free_holders_and_the_nearest_plan(ledger: Ledger) -> None:  # BR-03, BR-09
    grants = [ledger.take(1, "router"), ledger.take(12, "llama")]
    with pytest.raises(Busy) as refused:
        ledger.take(12, "mixtral")
    text = str(refused.value)
    pid = os.getpid()
    assert "mixtral wants 12 of the 24 cores of inf2.48xlarge; free: 1-11" in text
    assert f"0 by pid {pid} (router)" in text and f"12-23 by pid {pid} (llama)" in text
    assert "nearest that fits now: tensor_parallel: 4 on 4-7" in text or "tensor_parallel: 4 on 8-11" in text
    assert refused.value.retry
    for grant in grants:
        grant.release()


def test_fragmentation_is_named(ledger: Ledger) -> None:  # BR-04 on 8 cores: 2-3 and 6-7 held, ask 4
    eight = Ledger(ledger.directory, declared(8, vcpus=8))
    grants = [eight.take(2, f"m{i}") for i in range(4)]
    grants[0].release(), grants[2].release()
    with pytest.raises(Busy, match=r"free: 0-1, 4-5 \(4 cores, but no 4 in one run that starts at a multiple of 4\)"):
        eight.take(4, "big")
    grants[3].release()
    assert eight.take(4, "big").cores == (4, 5, 6, 7)


def test_what_can_never_be_is_a_configuration_error(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel 32 is not possible on inf2.48xlarge"):
        ledger.take(32, "a", wait_s=1e9)
    with pytest.raises(ConfigError, match="no aligned run of 8 cores in 4-11 of inf2.48xlarge"):
        ledger.take(8, "a", allowed=range(4, 12), wait_s=1e9)


def test_reserved_cores_are_left_alone(ledger: Ledger) -> None:  # BR-11
    grant = ledger.take(2, "small", allowed=range(16, 24))
    assert grant.cores == (16, 17)
    with ledger.take(8, "second", allowed=range(8, 24)) as second:
        assert second.cores == tuple(range(8, 16))
        with pytest.raises(Busy, match="free: 18-23"):
            ledger.take(8, "third", allowed=range(8, 24))
    grant.release()


def test_a_killed_owner_frees_its_cores_at_once(ledger: Ledger) -> None:
    owner = Owner(ledger.directory, "victim")
    assert owner.ask("take", 8) == ("granted", "0,1,2,3,4,5,6,7")
    assert ledger.holders()[0].pid == owner.process.pid and ledger.holders()[0].deployment == "victim"
    owner.kill()
    assert ledger.free() == ALL
    assert ledger.holders() == [], "a record without a lock is no holder"
    with ledger.take(24, "next") as grant:  # the stale record does not stand in the way, and is gone
        assert [holder.cores for holder in ledger.holders()] == [grant.cores]
        assert [path.name for path in ledger.directory.glob("*.json")] == [f"0-23.{os.getpid()}.json"]


@pytest.mark.parametrize("way", ["fork", "execute"])
def test_children_do_not_keep_the_cores_of_a_dead_parent(ledger: Ledger, strays: list[int], way: str) -> None:
    owner = Owner(ledger.directory, "parent")
    assert owner.ask("take", 24)[0] == "granted"
    child = owner.ask(way)
    strays.append(child)
    assert ledger.free() == frozenset(), "a child coming and going must not free its parent's cores either"
    owner.kill()
    assert process_started(child) is not None, "the child outlives its parent"
    eventually(lambda: ledger.free() == ALL, 60)  # a forked child lets go as it begins, which the parent does not wait for


def test_a_child_that_slipped_through_is_named(ledger: Ledger, strays: list[int]) -> None:  # BR-08: "a stray interpreter"
    owner = Owner(ledger.directory, "parent")
    assert owner.ask("take", 24)[0] == "granted"
    child = owner.ask("bare_fork")
    strays.append(child)
    owner.kill()
    with pytest.raises(Busy, match=rf"0-23 by pid {child} \(left no record; a child\?\)"):
        ledger.take(8, "next")


def test_late_release_is_waited_for(tmp_path: Path) -> None:  # BR-08, on a virtual clock
    now_s, pauses = 0.0, []
    held = Ledger(tmp_path, INF2).take(24, "dying")

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s
        pauses.append(pause_s)
        if now_s >= 3.0:
            held.release()

    grant = Ledger(tmp_path, INF2, clock=lambda: now_s, sleep=sleep).take(8, "next", wait_s=10.0)
    assert grant.cores == tuple(range(8))
    assert 3.0 <= now_s <= 4.0 and pauses == sorted(pauses) and max(pauses) <= 1.0
    grant.release()


def test_waiting_ends_at_the_limit_and_names_the_pid(tmp_path: Path) -> None:
    now_s = 0.0
    held = Ledger(tmp_path, INF2).take(24, "stuck")

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    with pytest.raises(Busy, match=rf"0-23 by pid {os.getpid()} \(stuck\).*waited 10 s for them"):
        Ledger(tmp_path, INF2, clock=lambda: now_s, sleep=sleep).take(8, "next", wait_s=10.0)
    assert now_s == pytest.approx(10.0)
    held.release()


def test_clean_removes_stale_records_only(ledger: Ledger) -> None:
    dead, alive = Owner(ledger.directory, "dead"), Owner(ledger.directory, "alive")
    assert dead.ask("take", 4)[0] == alive.ask("take", 4)[0] == "granted"
    dead.kill()
    (ledger.directory / "0-3.junk.json").write_text("{")
    gone = ledger.clean()
    assert sorted(path.name for path in gone) == sorted(["0-3.junk.json", f"0-3.{dead.process.pid}.json"])
    assert [holder.deployment for holder in ledger.holders()] == ["alive"]
    assert ledger.free() == ALL - {4, 5, 6, 7}
    alive.finish()


def test_a_reused_pid_is_not_blamed(ledger: Ledger) -> None:
    with ledger.take(8, "a") as grant:
        record = next(ledger.directory.glob("*.json"))
        record.write_text(json.dumps(json.loads(record.read_text()) | {"started": 1}))  # as if another process had this pid before
        assert [(h.pid, h.deployment, h.cores) for h in ledger.holders()] == [(os.getpid(), "", grant.cores)], "known from the kernel"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_users_share_cores_and_a_closed_lock_names_its_owner() -> None:  # BR-17
    with tempfile.TemporaryDirectory() as place:  # tmp_path is closed to other users
        Path(place).chmod(0o755)
        ledger = Ledger(Path(place) / "node", INF2)
        grant = ledger.take(8, "root's")
        stranger = Owner(ledger.directory, "stranger")
        assert stranger.ask("become_nobody") == 65534
        assert stranger.ask("take", 8) == ("granted", "8,9,10,11,12,13,14,15")
        assert [(h.deployment, h.pid) for h in ledger.holders()] == [("root's", os.getpid()), ("stranger", stranger.process.pid)]
        (ledger.directory / "cores.lock").chmod(0o600)
        kind, text = stranger.ask("take", 8)
        assert kind == "ConfigError" and "belongs to root (uid 0): delete it as that user" in text
        stranger.kill()
        grant.release()


def test_a_link_in_place_of_the_lock_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    ledger.directory.mkdir()
    (ledger.directory / "cores.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        ledger.free()
    assert not (tmp_path / "elsewhere").exists()


def test_simultaneous_takers_never_overlap(ledger: Ledger) -> None:
    owners = [Owner(ledger.directory, f"m{i}") for i in range(6)]
    for owner in owners:
        owner.send("take", 4)
    answers = [owner.answer() for owner in owners]
    assert sorted(core for kind, text in answers for core in map(int, text.split(","))) == list(range(24))
    assert {kind for kind, _ in answers} == {"granted"}
    for owner in owners:
        owner.finish()


SOAK_SIZES = (1, 2, 4, 8, 12, 24)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("turns", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_soak_of_random_starts_and_stops(ledger: Ledger, turns: int) -> None:  # BR-04, BR-05
    """Owners come and go by release, exit and SIGKILL. The test keeps its own books, from what the processes report."""
    dice = random.Random(4)
    living: dict[Owner, set[int]] = {}
    granted = refused = 0
    for turn in range(turns):
        if living and (dice.random() < 0.45 or len(living) > 10):
            owner = dice.choice(list(living))
            dice.choice((owner.finish, owner.leave, owner.kill, owner.kill))()
            del living[owner]
        newcomers = [Owner(ledger.directory, f"m{turn}.{i}") for i in range(dice.choice((0, 1, 1, 1, 2)))]
        sizes = [dice.choices(SOAK_SIZES, (6, 5, 4, 3, 1, 1))[0] for _ in newcomers]
        for owner, size in zip(newcomers, sizes, strict=True):
            owner.send("take", size)  # two at once race for the same cores
        for owner, size in zip(newcomers, sizes, strict=True):
            kind, text = owner.answer()
            taken = set().union(*living.values()) if living else set()
            if kind == "granted":
                cores = [int(core) for core in text.split(",")]
                assert cores == list(range(cores[0], cores[0] + size)) and cores[0] % size == 0 and cores[-1] < 24
                assert not taken & set(cores), f"turn {turn}: {cores} overlaps {taken}"
                living[owner] = set(cores)
                granted += 1
            else:
                assert kind == "Busy" and f"wants {size} of the 24 cores" in text
                if len(newcomers) == 1:
                    assert all(set(range(s, s + size)) & taken for s in range(0, 25 - size, size)), f"turn {turn}: {size} would have fitted"
                owner.leave()
                refused += 1
        assert ledger.free() == ALL - set().union(*living.values(), set())
    assert granted > turns // 4 and refused > turns // 20, (granted, refused)
    for owner in living:
        owner.kill()
    assert ledger.free() == ALL and ledger.holders() == []
    ledger.clean()
    assert [path.name for path in ledger.directory.iterdir()] == ["cores.lock"]


def test_records_are_whole_or_absent(tmp_path: Path) -> None:
    holder = Holder((4, 5), 1, "x", 1.0, None)
    path = records.write(tmp_path, holder)
    assert list(records.read(tmp_path)) == [(path, holder)]
    assert not holder.alive, "no start time: never alive"
