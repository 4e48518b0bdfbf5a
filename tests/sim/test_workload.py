"""Traces as they are published, and made-up requests: what is equal has equal hashes, and wrong lines are named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from rayneuron.errors import ConfigError
from rayneuron.sim.workload import Traffic, made_up, read

# After Azure/AzurePublicDataset's AzureLLMInferenceTrace_conv.csv (CC-BY) and kvcache-ai/Mooncake's conversation_trace.jsonl (Apache-2.0).
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1758, "output_length": 500, "hash_ids": [0, 1, 2, 3]}
{"timestamp": 3000, "input_length": 1600, "output_length": 490, "hash_ids": [0, 1, 15, 16]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_azure(tmp_path: Path) -> None:
    found = list(read(write(tmp_path, "a.csv", AZURE), scale=2.0, repeat=2))
    assert [(a.prompt, a.output) for a in found] == [(374, 44), (396, 109), (879, 55)] * 2
    assert [a.at_s for a in found[:3]] == pytest.approx([0.0, 4.314579 / 2, 4.541877 / 2], abs=1e-6)
    assert found[3].at_s == found[2].at_s and found[5].at_s == pytest.approx(2 * found[2].at_s)
    hashes = [h for a in found for h in a.hashes(64)]
    assert len(hashes) == len(set(hashes)) == sum((a.prompt + a.output) // 64 for a in found)  # nobody shares anything


@pytest.mark.parametrize("block", [64, 512])
def test_mooncake(tmp_path: Path, block: int) -> None:
    one, two = (a.hashes(block) for a in read(write(tmp_path, "m.jsonl", MOONCAKE)))
    assert len(one) == (1758 + 500) // block and len(two) == (1600 + 490) // block
    alike = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert alike == 1024 // block and not {*one[alike:]} & {*two[alike:]}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:52.1,x,3\n", r"a\.csv, line 5: invalid literal"),
        ("a.csv", "TIME,ContextTokens,GeneratedTokens\n1,2,3\n", r"a\.csv, line 1: there is no column TIMESTAMP"),
        ("a.csv", "", r"a\.csv, line 1: there is no column TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:15:52.1,5\n", r"a\.csv, line 5: it has fewer columns than the first line"),
        ("a.csv", AZURE.replace(",55", ",0"), r"a\.csv, line 4: a request has a token at least"),
        ("m.jsonl", MOONCAKE + "{}\n", r"m\.jsonl, line 3: there is no input_length"),
        ("m.jsonl", MOONCAKE + "[\n", r"m\.jsonl, line 3"),
        *(
            ("m.jsonl", f'{{"timestamp": {when}, "input_length": 9, "output_length": 9, "hash_ids": []}}', r"m\.jsonl, line 1: its time")
            for when in ("NaN", "Infinity", "1e400")
        ),
        ("m.parquet", "", r"a trace is a \.csv as Azure's"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(read(write(tmp_path, name, text)))


def test_made_up_requests_come_as_often_and_are_as_long_as_was_said() -> None:
    traffic = [Traffic(20.0, 300, 50, "a"), Traffic(5.0, 30, 400, "b", prefixes=10, shared=640)]
    found = list(made_up(traffic, 200.0, Random(3)))
    assert [a.at_s for a in found] == sorted(a.at_s for a in found) and found[-1].at_s < 200
    a, b = ([x for x in found if x.account == name] for name in "ab")
    assert len(a) == pytest.approx(4000, rel=0.1) and len(b) == pytest.approx(1000, rel=0.15)
    assert sum(x.prompt for x in a) / len(a) == pytest.approx(300, rel=0.1)
    assert sum(x.output for x in b) / len(b) == pytest.approx(400, rel=0.1)
    firsts = [x.hashes(64)[:10] for x in b]
    assert len(set(firsts)) == 10 and max(map(firsts.count, set(firsts))) > 0.2 * len(b)


def test_a_session_says_all_again_and_something_more() -> None:
    found = list(islice(made_up([Traffic(0.2, 100, 50, turns=4)], 100.0, Random(5)), 60))
    by: dict[str, list] = {}
    for arrival in found:
        by.setdefault(arrival.session, []).append(arrival)
    talks = [turns for turns in by.values() if len(turns) == 4]
    assert talks
    for turns in talks:
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.prompt > before.prompt + before.output and after.at_s > before.at_s
            assert after.hashes(16)[: len(before.hashes(16))] == before.hashes(16)
