"""`rayneuron neuron-check`: it stops at the first difference and says what to change; the probes of the SDK, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayneuron.cli import main
from rayneuron.errors import ConfigError
from rayneuron.neuron_check import graphs, host, serving, steps
from rayneuron.neuron_check.steps import Differs, Item, Machine, NotHere

ALL = [*host.HOST, *graphs.SDK, *graphs.COMPILE, *serving.COMPILED, *serving.CORE, *host.GROUP]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(standin=True, instance=None, model="demo:random:tp8", degrees=(1, 2), folder=tmp_path)


def answering(number: int, found: str | Exception) -> Item:
    def look(machine: Machine) -> str:
        if isinstance(found, Exception):
            raise found
        return found

    return Item(number, "host", f"command {number}", "what is right", "the cable", look)


def test_it_stops_at_the_first_difference(machine: Machine) -> None:
    asked = [answering(1, "fine"), answering(2, NotHere("no such thing")), Item(3, "host", "look at it", "green", "the lamp"),
             answering(4, Differs("it is red")), answering(5, "never asked")]  # fmt: skip
    said: list[str] = []
    answers = steps.ask(asked, machine, said.append)
    assert [a.outcome for a in answers] == ["ok", "not here", "by hand", "differs"]
    text = steps.report(answers, machine, ["rayneuron 1"])
    assert text.endswith("1 ok, 1 differs, 1 not here, 1 by hand\n") and "THIS WAS A STAND-IN" in text
    assert "     expected: what is right\n     found:    it is red\n     change:   the cable\n" in text and "never asked" not in text
    assert all(line in text for line in said)
    assert "STAND-IN" not in steps.report(answers, replace(machine, standin=False), [])


@pytest.mark.parametrize("problem", [ConfigError("write this"), RuntimeError("NRT 1003"), FileNotFoundError(2, "gone", "/x")])
def test_what_a_step_raises_is_what_was_found(machine: Machine, problem: Exception) -> None:
    (answer,) = steps.ask([answering(1, problem)], machine, lambda line: None)
    assert answer.outcome == "differs" and answer.found == f"{type(problem).__name__}: {problem}"


def test_every_step_says_all_there_is_to_say() -> None:
    numbers = [step.number for step in ALL]
    assert len(set(numbers)) == len(numbers) and {9, 10} <= set(numbers) <= set(range(1, 34))
    assert [s.stage for s in ALL] == sorted((s.stage for s in ALL), key=steps.STAGES.index), "the order in which they are asked"
    assert all(step.runs and step.expects and step.otherwise for step in ALL)


def test_the_sdk_is_asked_what_a_state_is(standin: Path, machine: Machine) -> None:
    """Probes 9 and 10, and the signatures. Where an SDK takes another thing for a state, that is a difference."""
    chosen = [s for s in (*graphs.SDK, *graphs.COMPILE) if s.number in (7, 8, 9, 10)]
    answers = steps.ask(chosen, machine, lambda line: None)
    assert [a.outcome for a in answers] == ["ok"] * 4
    assert "copy: refused: HLO generation failed: in-place operation on buffer kv_0" in answers[2].found
    assert "root: states ['kv_0']" in answers[2].found and "nested: states ['kv.0']" in answers[2].found
    assert answers[3].found == "weight_name_to_idx {}"


def test_an_sdk_that_keeps_no_states_is_seen(standin: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_states", lambda traced: [])
    (answer,) = steps.ask([s for s in graphs.COMPILE if s.number == 9], machine, lambda line: None)
    assert answer.outcome == "differs" and "root: states []" in answer.found
    monkeypatch.setitem(graphs._USED, "trace", ("model", "kwargs", "another"))
    (answer,) = steps.ask([s for s in graphs.SDK if s.number == 8], machine, lambda line: None)
    assert answer.outcome == "differs" and "trace has no another, but model, args, kwargs" in answer.found


def test_the_command_writes_a_report(standin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.txt"
    assert main(["neuron-check", "--only", "1", "--only", "10", "--report", str(report)]) == 0
    assert "this is a stand-in for the SDK" in capsys.readouterr().out and "2 ok, 0 differs" in report.read_text()
    assert main(["neuron-check", "--only", "99"]) == 2
    assert "there is no such step; there are 1 (host)" in capsys.readouterr().err


@pytest.mark.slow
def test_all_stages_on_the_stand_in(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that needs no devices: flags, each verb alone, whole models in processes of their own over 1, 2 and 8 ranks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "standin"))
    report = tmp_path / "report.txt"
    assert main(["neuron-check", "--report", str(report)]) == 0, report.read_text()
    text = report.read_text()
    assert "0 differs" in text and "8 cores: 64 of 64 tokens equal" in text and "both rows continue with" in text
