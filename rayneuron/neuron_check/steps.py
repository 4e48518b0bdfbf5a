"""One question to a machine after another, until an answer is not the expected one; and the report of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayneuron.errors import RayNeuronError

STAGES = ("host", "sdk", "compile", "core", "group")
Outcome = Literal["ok", "differs", "not here", "by hand"]


class Differs(Exception):
    """What was found is not what was expected."""


class NotHere(Exception):
    """This machine cannot be asked: why."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the questions are asked. `standin`: the SDK only looks like one; `model`: a model directory or demo:NAME of 8 KV heads or more;
    `degrees`: tensor_parallel to try; `folder`: where work goes; `hosts`: those of a group."""

    standin: bool
    instance: str | None
    model: str
    degrees: tuple[int, ...]
    folder: Path
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """A question. `look` returns what was found, or raises Differs or NotHere; None: for people, `runs` is the command."""

    number: int
    stage: str
    runs: str
    expects: str
    otherwise: str
    look: Callable[[Machine], str] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a step."""

    step: Item
    outcome: Outcome
    found: str
    seconds: float


def ask(steps: Sequence[Item], machine: Machine, tell: Callable[[str], None]) -> list[Finding]:
    """Every step in order, told as it is answered; the first that differs is the last."""
    answers = []
    for step in steps:
        started = time.monotonic()
        outcome, found = _answer(step, machine)
        answers.append(Finding(step, outcome, found, time.monotonic() - started))
        for line in told(answers[-1]):
            tell(line)
        if outcome == "differs":
            break
    return answers


def _answer(step: Item, machine: Machine) -> tuple[Outcome, str]:
    if step.look is None:
        return "by hand", "not run: it needs eyes, or another machine"
    try:
        return "ok", step.look(machine)
    except NotHere as why:
        return "not here", str(why)
    except Differs as found:
        return "differs", str(found)
    except (RayNeuronError, OSError, RuntimeError, ValueError, TypeError, ImportError, subprocess.SubprocessError) as problem:
        return "differs", f"{type(problem).__name__}: {problem}"


def told(answer: Finding) -> list[str]:
    """An answer for people."""
    step = answer.step
    lines = [f"{step.number:>2} {step.stage:<8} {answer.outcome:<8} {step.runs} ({answer.seconds:.1f} s)", f"     found:    {answer.found}"]
    if answer.outcome != "ok":
        lines.insert(1, f"     expected: {step.expects}")
    return lines + ([f"     change:   {step.otherwise}"] if answer.outcome == "differs" else [])


def report(answers: Sequence[Finding], machine: Machine, about: Sequence[str]) -> str:
    """Everything that was asked and found, to be attached to a bug."""
    head = ["rayneuron neuron-check", *about, f"model {machine.model}, tensor_parallel {', '.join(map(str, machine.degrees))}"]
    if machine.standin:
        head.append("THIS WAS A STAND-IN for the SDK: nothing below says anything of hardware.")
    counts = {outcome: sum(a.outcome == outcome for a in answers) for outcome in ("ok", "differs", "not here", "by hand")}
    tail = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    return "\n".join([*head, "", *(line for answer in answers for line in told(answer)), "", tail, ""])


def run(command: Sequence[str], timeout_s: float = 600.0) -> str:
    """What a command prints. Raises NotHere where there is no such command, Differs where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise NotHere(f"there is no {command[0]} on this machine") from None
    if done.returncode:
        raise Differs(f"{' '.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout.strip()
