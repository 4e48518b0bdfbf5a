"""`rayneuron neuron-check`: it stops at the first difference and says what to change; the probes of the SDK, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rayneuron.cli import main
from rayneuron.errors import ConfigError
from rayneuron.neuron_check import graphs, host, probes, serving, steps
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
    assert numbers == list(range(1, 34)), "those of the review's page, in its order"
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


def test_every_verb_on_a_core_is_the_cpus(standin: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 15, small: ours are right, the SDK's own beside them too, and what they avoid is refused by the compiler. A verb that
    gives other numbers, or none, is named."""
    for name, size in (("ROWS", 4), ("VOCAB", 1024), ("LENGTH", 256), ("HIDDEN", 64), ("INNER", 48), ("_RUNS", 2)):
        monkeypatch.setattr(probes, name, size)
    found: dict[str, dict[str, object]] = {}

    def here(machine: Machine, **said: object) -> dict[str, dict[str, object]]:
        found.update(found or probes.measured(machine.folder / "probes"))
        return found

    monkeypatch.setattr(serving, "ask", here)
    (told,) = steps.ask([s for s in serving.CORE if s.number == 15], machine, lambda line: None)
    assert told.outcome == "ok", told.found
    assert all(one["right"] for one in found.values() if not one["avoided"])
    assert {name for name, one in found.items() if one["like"]} == {"Argmax", "TopK", "Softmax", "RmsNorm", "KV written, then attention"}
    assert "[NCC_EVRF013]" in str(found["argsort of integers"]["failed"]) and "infinite" in str(found["where(-inf)"]["failed"])
    assert "RmsNorm: off by" in told.found and "(does the work of RMS norm)" in told.found
    found["TopK"]["right"], found["log_sum"] = False, {"failed": "NRT 1003", "like": "", "avoided": False}
    found["draw"] |= {"places": 9, "right": False}
    (told,) = steps.ask([s for s in serving.CORE if s.number == 15], machine, lambda line: None)
    assert told.outcome == "differs" and told.found.startswith("log_sum, draw differ; ")
    assert "log_sum: failed (NRT 1003)" in told.found and "ids by 9" in told.found


def test_a_verb_that_takes_too_long_is_named(standin: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 13; what the verbs avoid, and the SDK's own, may take any time."""
    slow = {"attention", "scaled_dot_product_attention", "TopK"}
    monkeypatch.setattr(graphs, "_seconds", lambda machine, found, name, probe: 61.0 if name in slow else 2.0)
    (told,) = steps.ask([s for s in graphs.COMPILE if s.number == 13], machine, lambda line: None)
    assert told.outcome == "differs" and told.found.startswith("attention took more than 60 s; ")
    slow.remove("attention")
    (told,) = steps.ask([s for s in graphs.COMPILE if s.number == 13], machine, lambda line: None)
    assert told.outcome == "ok" and "TopK taken in 61.0 s" in told.found


def test_a_number_that_is_none_is_not_right() -> None:
    probe = probes.Probe(lambda x: x * 2, (torch.ones(3),))
    assert probes.judged(probe, [torch.full((3,), 2.0)], 1.0)["right"]
    for wrong in (2.1, float("nan"), float("inf")):
        assert not probes.judged(probe, [torch.tensor([2.0, 2.0, wrong])], 1.0)["right"]


def test_what_a_core_holds_gives_the_plans_figures() -> None:
    """Step 21: 24 graphs of 40 layers; both figures come out as they were put in, and a tenth more than planned is a difference."""
    mib = 2**20
    sizes = {"tensors": 8000, "model_code": 96 + 500, "dma_rings": 1900, "collectives": 400, "scratchpad": 528}
    held = {kind: size * mib for kind, size in sizes.items()}
    said = {"found": held, "planned": {"total": 11000 * mib}, "graphs": 24, "layers": 40}
    assert serving.compared(said).endswith("by it GRAPH_BYTES is 200 MiB and SHARED_BYTES 1024 MiB")
    with pytest.raises(Differs, match="GRAPH_BYTES is 200 MiB"):
        serving.compared(said | {"planned": {"total": 9000 * mib}})


def test_the_command_writes_a_report(standin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.txt"
    assert main(["neuron-check", "--only", "1", "--only", "10", "--report", str(report)]) == 0
    assert "this is a stand-in for the SDK" in capsys.readouterr().out and "2 ok, 0 differs" in report.read_text()
    assert main(["neuron-check", "--only", "99"]) == 2
    assert "there is no such step; there are 1 (host)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_stages_on_the_stand_in(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that needs no devices: flags, each verb alone, whole models in processes of their own over 1, 2 and 8 ranks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "standin"))
    report = tmp_path / "report.txt"
    assert main(["neuron-check", "--report", str(report)]) == 0, report.read_text()
    text = report.read_text()
    assert "0 differs" in text and "8 cores: 64 of 64 tokens equal" in text and "both rows continue with" in text
    assert "async: 64 of 64 tokens equal" in text and "a step of 16 rows over 8 ranks: " in text and "f8e4m3 KV: first" in text
