"""A host of two nodes through Ray, with real processes killed: arbiter, gateway, keeper, model and node; and files deployed anew.

After each: what was held is answered, no core is given twice (by the nodes' ledgers), and nothing stays behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger
from tests.cluster.conftest import Cluster, started
from tests.cluster.faults import Client
from tests.serve import own_ray
from tests.serve.scripted import eventually, sse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GO = {"prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
WAIT_S = 180.0
KIND = instance("cores:4")


class Home(Cluster):
    """The cluster, its gateway, and a thread that looks at every ledger all the time."""

    model: Path

    def args(self, **more: Any) -> dict[str, Any]:
        one = {"model": {"path": str(self.model)}, "dtype": "fp32", "max_model_len": 512, "max_num_seqs": 4, "threads": 1, "seed": 5}
        one |= {"serving": {"num_cpus": 0.1, "drain_timeout_s": 5}, "group": {"start_s": 120, "load_s": 120}}
        nap, wide = {**one, "tensor_parallel": 2}, {**one, "tensor_parallel": 4}
        models = [{"name": "nap", "args": nap, **more}, {"name": "wide", "args": wide, "priority": 1}]
        return {
            "models": models, "host": {"instance": "cores:4", "nodes": 2}, "explain": True,
            "scaling": {"min_life_s": 0.5, "orphan_s": 8, "drain_s": 20}, "serving": {"num_cpus": 0.1, "drain_timeout_s": 5},
            "replay": {"hold_s": 100},
        }  # fmt: skip

    def deploy(self, args: dict[str, Any]) -> None:
        entry = {"name": "gateway", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": args}
        own_ray.deploy(self.http, entry, proxy_location="HeadOnly")

    def ask(self, model: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=GO | {"model": model, **more}, timeout=WAIT_S)

    def later(self, model: str) -> Call:
        return Call(self, model)

    def told(self) -> dict[str, Any]:
        """What the arbiter says; {} while there is none."""
        try:
            reply = httpx.get(f"{self.url}/debug/hosts", timeout=10)
        except httpx.HTTPError:
            return {}
        return dict(reply.json()) if reply.status_code == 200 else {}

    def seats(self) -> dict[str, str]:
        return {seat["seat"]: seat["state"] for seat in self.told().get("seats", ())}

    def held(self) -> dict[str, list[tuple[int, frozenset[int]]]]:
        """(pid, cores) of whoever holds any, by node."""
        found = {}
        for folder in (self.folder / "cores").glob("*"):
            found[folder.name] = [(holder.pid, frozenset(holder.cores)) for holder in Ledger(folder, KIND).holders()]
        return found

    def taken(self) -> int:
        return sum(len(cores) for node in self.held().values() for _, cores in node)

    def of(self, part: str) -> list[int]:
        return self.pids(f"ray::ServeReplica:{part}")


class Call(threading.Thread):
    """A call that is under way."""

    def __init__(self, home: Home, model: str) -> None:
        super().__init__(daemon=True)
        self.home, self.model = home, model
        self.reply: httpx.Response | None = None
        self.broken = ""
        self.start()

    def run(self) -> None:
        try:
            self.reply = self.home.ask(self.model)
        except httpx.HTTPError as wrong:
            self.broken = repr(wrong)

    def done(self) -> httpx.Response:
        self.join(WAIT_S)
        assert self.reply is not None, self.broken or "it never ended"
        return self.reply


class Watch(threading.Thread):
    """Looks at the ledgers of all nodes until told to end; keeps what must never be seen."""

    def __init__(self, home: Home) -> None:
        super().__init__(daemon=True)
        self.home, self.ended, self.twice, self.looks = home, threading.Event(), [], 0
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            for node, holders in self.home.held().items():
                cores = [core for _, held in holders for core in held]
                if len(cores) != len(set(cores)):
                    self.twice.append((node, holders))
            self.looks += 1


@pytest.fixture(scope="module")
def home(tiny: Path) -> Iterator[Home]:
    with started(Home) as made:
        assert isinstance(made, Home)
        made.model = made.folder / "model"
        shutil.copytree(tiny, made.model)
        watch = Watch(made)
        made.deploy(made.args())
        eventually(lambda: len(made.told().get("nodes", ())) == 2, 120, made.told)
        yield made
        watch.ended.set()
        watch.join()
        assert watch.looks > 10 and not watch.twice, watch.twice


@pytest.fixture(autouse=True)
def asleep(home: Home) -> Iterator[None]:
    """Every test begins and ends with nobody awake; files of models that went are put to sleep by another file without them."""
    from ray import serve

    yield
    for name in list(serve.status().applications):
        if name != "gateway":
            serve.delete(name)
    eventually(lambda: home.told() and not home.seats() and not home.taken(), 60, lambda: (home.seats(), home.held()))


def kill(pids: list[int]) -> float:
    assert pids
    at_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return at_s


def test_the_arbiter_killed_while_a_model_wakes(home: Home) -> None:
    call = home.later("nap")
    eventually(lambda: home.seats() == {"nap.0": "starting"} and home.of("nap.0"), WAIT_S, home.told)
    before = home.of("gateway:Arbiter")
    kill(before)
    reply = call.done()
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 12, reply.text
    eventually(lambda: home.seats() == {"nap.0": "ready"}, WAIT_S, home.told)
    assert len(home.of("nap.0")) == 1 and home.taken() == 2 and home.of("gateway:Arbiter") != before


def test_the_gateway_killed_while_a_model_wakes(home: Home) -> None:
    call = home.later("nap")
    eventually(lambda: home.seats() == {"nap.0": "starting"}, WAIT_S, home.told)
    kill(home.of("gateway:Gateway"))
    call.join(60)
    assert not call.is_alive(), "its client is told at once"
    assert call.reply is None or call.reply.status_code >= 500
    eventually(lambda: home.told(), WAIT_S)
    assert home.ask("nap").status_code == 200
    assert len(home.of("nap.0")) == 1 and home.taken() == 2


def test_a_model_killed_while_it_is_awake(home: Home) -> None:
    """Its stream waits for it to come again on the same cores and goes on: every token once."""
    assert home.ask("nap").status_code == 200
    whole = home.ask("nap", max_tokens=300).json()["choices"][0]["text"]
    client = Client(home, GO | {"model": "nap", "max_tokens": 300, "stream": True})
    assert client.begun.wait(60)
    at_s = kill(home.of("nap.0"))
    client.join(WAIT_S)
    assert client.error_s is None and client.lines[-2:] and sse(client.lines)[-1] == "[DONE]", (client.broken, client.lines[-3:])
    text = "".join(json.loads(event)["choices"][0]["text"] for event in sse(client.lines)[:-1])
    print(f"killed, and ended {client.ended_s - at_s:.1f} s later")
    assert text == whole
    eventually(lambda: home.seats() == {"nap.0": "ready"}, WAIT_S, home.told)


def test_a_model_that_was_awake_and_cannot_come_again(home: Home) -> None:
    """Serve would try for ever: the seat ends, its cores are free, and callers are told why."""
    assert home.ask("nap").status_code == 200
    aside = home.folder / "aside"
    os.rename(home.model, aside)
    try:
        kill(home.of("nap.0"))
        eventually(lambda: home.told() and home.told()["models"]["nap"]["failed"], WAIT_S, home.told)
        eventually(lambda: not home.seats() and not home.taken(), 60, home.told)
        reply = home.ask("nap")
        assert reply.status_code == 503 and str(home.model) in reply.text and int(reply.headers["retry-after"]) >= 1, reply.text
    finally:
        os.rename(aside, home.model)
    home.deploy(home.args(idle_s=299))  # other words: nothing is held against them
    eventually(lambda: home.told() and not home.told()["models"]["nap"]["failed"], WAIT_S, home.told)
    assert home.ask("nap").status_code == 200


def test_a_file_deployed_anew_keeps_seats_of_the_same_words_and_ends_the_others(home: Home) -> None:
    assert home.ask("nap").status_code == 200 and home.ask("wide").status_code == 200
    nap, wide = home.of("nap.0"), home.of("wide.0")
    args = home.args()
    args["models"][1]["args"] |= {"max_model_len": 384}
    home.deploy(args)
    eventually(lambda: wide[0] not in home.of("wide"), WAIT_S, lambda: (home.seats(), home.of("wide")))
    eventually(lambda: home.seats() == {"nap.0": "ready"}, WAIT_S, home.told)
    assert home.of("nap.0") == nap and home.taken() == 2
    assert home.ask("wide").status_code == 200 and home.ask("nap").status_code == 200
    args["models"] = args["models"][1:]
    home.deploy(args)  # and a model that is listed no more
    eventually(lambda: home.seats() == {"wide.0": "ready"} and not home.of("nap"), WAIT_S, lambda: (home.told(), home.of("nap")))
    home.deploy(home.args())
    eventually(lambda: home.told() and "nap" in home.told()["models"], WAIT_S, home.told)


def test_a_keeper_killed_costs_nobody_its_seat(home: Home) -> None:
    assert home.ask("nap").status_code == 200
    eventually(lambda: home.seats() == {"nap.0": "ready"}, WAIT_S, home.told)
    before, keepers = home.of("nap.0"), home.pids("ray::Keeper")
    assert len(keepers) == 2
    kill(keepers)
    eventually(lambda: len(set(home.pids("ray::Keeper")) - set(keepers)) == 2, 60, lambda: home.pids("ray::Keeper"))
    reply = home.ask("wide")
    assert reply.status_code == 200, ("and seats are given again", reply.text)
    assert home.of("nap.0") == before and home.seats()["nap.0"] == "ready"


def test_cores_are_free_soon_after_the_last_stream(home: Home) -> None:
    """Bar 9. A model goes for one of more priority while it streams: its stream ends by itself, then its cores are free within 2 s."""
    args = home.args()
    args["host"]["nodes"] = 1
    home.deploy(args)
    eventually(lambda: len(home.told().get("nodes", ())) == 1, WAIT_S, home.told)
    reply = home.ask("nap")
    assert reply.status_code == 200, reply.text
    client = Client(home, GO | {"model": "nap", "max_tokens": 400, "stream": True})
    assert client.begun.wait(60)
    before = home.of("nap.0")
    call = home.later("wide")
    freed: list[float] = []
    while not freed and time.monotonic() < client.times[0] + WAIT_S:
        if not any(pid in before for node in home.held().values() for pid, _ in node):
            freed.append(time.monotonic())
        time.sleep(0.01)
    client.join(60)
    assert sse(client.lines)[-1] == "[DONE]" and client.error_s is None, client.lines[-3:]
    print(f"cores free {freed[0] - client.ended_s:.2f} s after the last stream")
    assert freed[0] - client.ended_s <= 2.0
    assert call.done().status_code == 200
    home.deploy(home.args())
    eventually(lambda: len(home.told().get("nodes", ())) == 2, WAIT_S, home.told)


def test_a_node_that_is_lost_and_the_end_of_the_gateway(home: Home) -> None:
    """The seat there is given up and the model wakes on the other node; where the gateway goes for good, seats end by themselves."""
    from ray import serve

    assert home.ask("nap").status_code == 200
    node = home.node_of(home.of("nap.0")[0])
    home.kill_node(node)
    shutil.rmtree(home.folder / "cores" / node)  # what a host that is gone has in its /tmp
    eventually(lambda: home.told() and list(home.told()["nodes"]) == [n for n in home.names if n != node], WAIT_S, home.told)
    assert home.ask("nap").status_code == 200
    assert home.taken() == 2
    home.start_worker_node(node)
    eventually(lambda: len(home.told().get("nodes", ())) == 2, WAIT_S, home.told)
    began_s = time.monotonic()
    serve.delete("gateway")
    eventually(lambda: not home.of("nap") and not home.taken(), 60, home.held)
    print(f"the seats have ended {time.monotonic() - began_s:.1f} s after their gateway was deleted (orphan_s 8)")
    home.deploy(home.args())
    eventually(lambda: len(home.told().get("nodes", ())) == 2, 120, home.told)
