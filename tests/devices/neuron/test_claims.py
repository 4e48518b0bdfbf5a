"""The claims of the Neuron device's README are held by what they name: every finding of the review once, tests and steps that there are."""

from __future__ import annotations

import re
from pathlib import Path

from rayneuron.neuron_check import graphs, host, serving

ROOT = Path(__file__).parents[3]
STEPS = {item.number for item in (*host.HOST, *graphs.SDK, *graphs.COMPILE, *serving.COMPILED, *serving.CORE, *host.GROUP)}
STATES = re.compile(r"(fixed|refused|doubtful)?(?:; )?(?:steps? ([\d, ]+))?")


def rows() -> list[list[str]]:
    text = (ROOT / "rayneuron/devices/neuron/README.md").read_text().partition("\n## Claims\n")[2]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| ")][1:]


def named_in(path: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.M))


def test_every_finding_is_fixed_refused_or_doubtful() -> None:
    found: list[int] = []
    for number, state, *_ in rows():
        said = STATES.fullmatch(state)
        assert said, state
        steps = {int(step) for step in re.findall(r"\d+", said[2] or "")}
        assert steps <= STEPS, f"{number}: neuron-check has no step {steps - STEPS}"
        assert steps or said[1] != "doubtful", f"{number}: which step decides?"
        numbers = [int(one) for one in re.findall(r"\d+", number)]
        assert bool(numbers) == bool(said[1]), f"{number}: {state}"
        found += numbers
    assert sorted(found) == list(range(1, 34))


def test_what_proves_a_claim_is_there() -> None:
    """A test is named before the file that has it."""
    for number, _, claim, proof, source, certainty in rows():
        assert claim and source and certainty
        left: list[str] = []
        for word in re.findall(r"`([^`]+)`", proof):
            if re.fullmatch(r"test_\w+", word):
                left.append(word)
            elif word.startswith("tests/"):
                assert left and not set(left) - named_in(word), f"{number}: {word} has no {set(left) - named_in(word)}"
                left = []
        assert not left, f"{number}: in which file is {left}?"
        assert "test_" in proof or "examples/hlo_check" in proof, f"{number}: nothing proves it"
