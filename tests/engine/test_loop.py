"""The engine's thread: whatever `deliver` or a step does, the engine is given back, and no request ends another one."""

from __future__ import annotations

import logging
import threading

import pytest

from rayneuron.engine.engine import Engine
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import NotReady, RequestError, UnknownModel
from rayneuron.seeds import Seeds
from rayneuron.types import Request, SamplingParams, TokenDelta
from tests.serve.scripted import PATIENCE_S, ScriptedRunner, opener_of


@pytest.fixture
def engine(tiny) -> Engine:
    from rayneuron import config

    return opener_of(tiny)(config.parse({"model": {"path": str(tiny)}})).engine


class Ends:
    """Collects deltas; `wait` returns the last one of a choice."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self._news = threading.Condition()

    def deliver(self, deltas: list[TokenDelta]) -> None:
        with self._news:
            self.deltas += deltas
            self._news.notify_all()

    def wait(self, request_id: str, count: int = 1) -> list[TokenDelta]:
        with self._news:
            assert self._news.wait_for(lambda: len(self._last(request_id)) >= count, PATIENCE_S), self.deltas
            return self._last(request_id)

    def _last(self, request_id: str) -> list[TokenDelta]:
        return [d for d in self.deltas if d.request_id == request_id and d.finish_reason is not None]


def ask(name: str, tokens: int = 8, **params: object) -> Request:
    return Request(id=name, prompt_ids=[20, 21], params=SamplingParams(max_tokens=tokens, ignore_eos=True, **params))  # type: ignore[arg-type]


def runner_of(engine: Engine) -> ScriptedRunner:
    runner = engine.runner
    assert isinstance(runner, ScriptedRunner)
    return runner


def test_the_engine_is_closed_when_nobody_can_be_told(engine: Engine) -> None:
    """As when the event loop that deltas go to has ended."""

    def gone(deltas: list[TokenDelta]) -> None:
        raise RuntimeError("Event loop is closed")

    loop = EngineLoop(engine, gone)
    loop.submit(ask("a"))
    loop._thread.join(PATIENCE_S)
    assert not loop._thread.is_alive() and runner_of(engine).closed and not loop.alive
    with pytest.raises(NotReady, match="Event loop is closed"):
        loop.submit(ask("b"))
    loop.close()


def test_closing_says_what_did_not_end(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    loop, ends = EngineLoop(engine, (ends := Ends()).deliver), ends
    runner_of(engine).hold()
    loop.submit(ask("a"))
    while not engine.snapshot().running:
        threading.Event().wait(0.001)
    with caplog.at_level(logging.ERROR, logger="rayneuron"):
        loop.close(timeout_s=0.05)
    assert "has not closed within 0.05 s: a step of 1 running sequences" in caplog.text and not runner_of(engine).closed
    runner_of(engine).free()
    loop.close()
    assert runner_of(engine).closed
    assert ends.wait("a")[0].fault == "engine"


@pytest.mark.parametrize("running", [False, True])
def test_an_id_in_use_is_refused_to_who_asks_second(engine: Engine, running: bool) -> None:
    loop, ends = EngineLoop(engine, (ends := Ends()).deliver), ends
    runner_of(engine).hold()
    loop.submit(ask("other"))
    loop.submit(ask("a"))
    if running:
        while engine.snapshot().running < 2:
            runner_of(engine).allow(1)
            threading.Event().wait(0.001)
    with pytest.raises(RequestError, match="'a' is in use") as wrong:
        loop.submit(ask("a", 3))
    assert wrong.value.param == "request_id"
    runner_of(engine).free()
    assert ends.wait("a")[0].finish_reason == "length"
    assert sum(len(d.token_ids) for d in ends.deltas if d.request_id == "a") == 8
    loop.close()


def test_a_request_that_cannot_be_added_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ends, add = EngineLoop(engine, (ends := Ends()).deliver), ends, engine.add

    def stumble(request: Request, loan: object) -> None:
        if request.id == "bad":
            raise OverflowError("a secret of the machine")
        if request.id == "late":
            raise UnknownModel("what it names has gone", param="model")
        add(request)

    monkeypatch.setattr(engine, "add", stumble)
    runner_of(engine).hold()
    loop.submit(ask("good"))
    loop.submit(ask("bad", n=2))
    loop.submit(ask("late"))
    runner_of(engine).free()
    (late,) = ends.wait("late")
    assert (late.finish_reason, late.fault, late.error, late.param) == ("error", "call", "what it names has gone", "model")
    bad = ends.wait("bad", 2)
    assert [(d.finish_reason, d.fault, d.index) for d in bad] == [("error", "choice", 0), ("error", "choice", 1)]
    assert "secret" not in str(bad[0].error)
    assert ends.wait("good")[0].finish_reason == "length" and loop.alive
    loop.close()


def test_a_seed_is_fixed_where_the_request_is_made(engine: Engine) -> None:
    """By whoever opens the call, so that another engine that goes on with it draws the same; the engine draws only where nobody has."""
    seeds, requests = Seeds(100), [ask("a", n=3), ask("b", seed=7), ask("c"), ask("d")]
    requests[3].seed = 9
    for request in requests:
        seeds.fix(request)
        engine.add(request)
    assert [r.seed for r in requests] == [100, 7, 100 + 4 * 0x9E37, 9]
    assert {r.id: [s.seed for s in engine._requests[r.id].values()] for r in requests} == {
        "a": [100, 101, 102], "b": [7], "c": [100 + 4 * 0x9E37], "d": [9],
    }  # fmt: skip
    drawn = [ask("e"), ask("f")]
    for request in drawn:
        Seeds(None).fix(request)
    assert drawn[0].seed != drawn[1].seed
    engine.add(ask("g"))
    assert engine._requests["g"][0].seed >= 0
