"""Traces as they are published, and made-up requests: what is equal has equal hashes, and wrong lines are named."""

from __future__ import annotations

import gzip
import statistics
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from rayneuron.errors import ConfigError
from rayneuron.sim.traces import read
from rayneuron.sim.workload import Traffic, made_up

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


VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n3772,54,3826\n2015.0,156.0,2171\n"


def test_vidur_and_its_gaps(tmp_path: Path) -> None:
    found = list(read(write(tmp_path, "v.csv", VIDUR), repeat=2000, rate=5.0, burstiness=0.25))
    assert [(a.prompt, a.output) for a in found[:2]] == [(3772, 54), (2015, 156)]
    gaps = [b.at_s - a.at_s for a, b in zip(found, found[1:], strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1) and statistics.stdev(gaps) == pytest.approx(2 * 0.2, rel=0.1)


@pytest.mark.parametrize(("name", "text"), [("a.csv", AZURE), ("v.csv", VIDUR), ("m.jsonl", MOONCAKE)])
def test_a_file_is_the_same_however_it_is_written(tmp_path: Path, name: str, text: str) -> None:
    """With a mark of byte order, lines as Windows ends them, no end of the last one, empty ones between, packed, or named in capitals."""
    plain, raw = list(read(write(tmp_path, name, text))), text.encode()
    ways = {name: b"\xef\xbb\xbf" + raw, f"w{name}": raw.replace(b"\n", b"\r\n"), f"e{name}": raw.rstrip(), name.upper(): raw}
    ways |= {f"b{name}": raw.replace(b"\n", b"\n\n"), f"{name}.gz": gzip.compress(raw)}
    for other, content in ways.items():
        (tmp_path / other).write_bytes(content)
        assert list(read(tmp_path / other)) == plain, other


def test_a_slice_of_a_trace_begins_when_its_first_request_comes(tmp_path: Path) -> None:
    late = MOONCAKE.replace('"timestamp": 0', '"timestamp": 1000').replace('"timestamp": 3000', '"timestamp": 4000')
    assert [a.at_s for a in read(write(tmp_path, "m.jsonl", late))] == [0.0, 3.0]
    zoned = AZURE.replace("5900,", "+00:00,").replace("9690,", "+00:00,").replace("4670,", "+00:00,")  # as the traces of 2024 say it
    numbers = "TIMESTAMP,ContextTokens,GeneratedTokens\n100.5,374,44\n104.814579,396,109\n105,879,55\n"
    for text in (zoned, numbers):
        assert list(read(write(tmp_path, "a.csv", text)))[1].at_s == pytest.approx(4.3145, abs=1e-3)


def line(**said: object) -> str:
    whole = {"timestamp": "9", "input_length": "9", "output_length": "9", "hash_ids": "[]"} | said
    return MOONCAKE + "{" + ", ".join(f'"{name}": {value}' for name, value in whole.items()) + "}"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        *(
            ("a.csv", f"{AZURE}2023-11-16 18:15:52.1,{tokens},3\n", r"a\.csv, line 5: ContextTokens .* is no whole number of 1 or more")
            for tokens in ("x", "", "-5", "0", "nan", "inf", "5.5", "9e999")
        ),
        *(
            ("a.csv", f"{AZURE}{when},5,3\n", r"a\.csv, line 5: TIMESTAMP .* is neither a date and time")
            for when in ("yesterday", "", "nan", "2023-13-16 18:15:52", "-inf", "2023-11-16 18:15:5")
        ),
        ("a.csv", "TIME,ContextTokens,GeneratedTokens\n1,2,3\n", r"a\.csv, line 1: there is no column TIMESTAMP"),
        ("a.csv", "", r"a\.csv, line 1: it is empty; the first line says TIMESTAMP,ContextTokens,GeneratedTokens or num_pre"),
        ("a.csv", AZURE + "2023-11-16 18:15:52.1,5\n", r"a\.csv, line 5: it has 2 columns, the first line 3"),
        ("a.csv", AZURE + "2023-11-16 18:15:52.1,5,6,7\n", r"a\.csv, line 5: it has 4 columns, the first line 3"),
        ("a.csv", AZURE + "\n\n2023-11-16 18:15:52.1,5\n", r"a\.csv, line 7: it has 2 columns"),
        ("a.csv", AZURE + "2023-11-16 18:15:40.1,5,6\n", r"a\.csv, line 5: it came before the one on the line above; sort"),
        ("a.csv", AZURE + "2023-11-16 18:15:" + "9" * 200_000 + ",5,6\n", r"a\.csv, line 5: field larger than field limit"),
        ("a.csv", AZURE.replace(",55", ",0"), r"a\.csv, line 4: GeneratedTokens '0' is no whole number"),
        ("v.csv", VIDUR + "10.7,3,13\n", r"v\.csv, line 4: num_prefill_tokens '10.7' is no whole number"),
        ("v.csv", VIDUR + "10,nan,13\n", r"v\.csv, line 4: num_decode_tokens 'nan' is no whole number"),
        ("v.csv", VIDUR + "10\n", r"v\.csv, line 4: it has 1 columns, the first line 3"),
        ("m.jsonl", MOONCAKE + "{}\n", r"m\.jsonl, line 3: there is no timestamp"),
        ("m.jsonl", MOONCAKE + "[1]\n", r"m\.jsonl, line 3: it is no JSON object"),
        ("m.jsonl", MOONCAKE + MOONCAKE[:40], r"m\.jsonl, line 3: Unterminated string"),
        ("m.jsonl", MOONCAKE + "\n" + "[" * 100_000, r"m\.jsonl, line 4: "),
        *(
            ("m.jsonl", line(timestamp=when), r"m\.jsonl, line 3: timestamp .* is no number of milliseconds")
            for when in ("NaN", "Infinity", "1e400", "true", '"9"', "null")
        ),
        ("m.jsonl", line(), r"m\.jsonl, line 3: it came before the one on the line above"),
        *(("m.jsonl", line(input_length=n), r"m\.jsonl, line 3: input_length") for n in ("-9", "9.7", "true", "NaN", '"x"', "[]")),
        *(("m.jsonl", line(hash_ids=n), r"m\.jsonl, line 3: hash_ids are no list") for n in ("null", "[-1]", "[1e3]", "[9e99]", '"abc"')),
        ("m.jsonl", line(hash_ids=[1 << 64]), r"m\.jsonl, line 3: hash_ids are no list of whole numbers"),
        ("m.parquet", "", r"a trace is a \.csv as Azure's"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(read(write(tmp_path, name, text)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", AZURE.encode() + b"\xff,5,3\n", r"a\.csv, line 5: it is no UTF-8 text"),
        ("a.csv.gz", AZURE.encode(), r"a\.csv\.gz, behind line 0: it is not what gzip packs"),
        ("a.csv.gz", gzip.compress(AZURE.encode() * 2000)[:-40], r"a\.csv\.gz, "),
        ("m.jsonl", b"\x8b\xb7", r"m\.jsonl, line 1: it is no UTF-8 text"),
    ],
)
def test_what_is_no_text_at_all_is_said(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        list(read(tmp_path / name))


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 4.0])
def test_bursts(burstiness: float) -> None:
    """Of the shape of a Gamma the square of the deviation over the mean is one over it."""
    found = list(islice(made_up([Traffic(20.0, 30, 5, burstiness=burstiness)], float("inf"), Random(3)), 20_000))
    gaps = [b.at_s - a.at_s for a, b in zip(found, found[1:], strict=False)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.05, rel=0.05) and (statistics.stdev(gaps) / mean) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


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
