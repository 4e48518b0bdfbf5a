"""The benchmarks themselves, at tiny sizes: what they add up, and that each runs to its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import engine
import gateway
import prefix
import prompts
import pytest
import scheduling
import serving
import serving_peers
import simulated
import start
from client import Load, Reply
from fake_http import STREAM, Fake, chunk
from server import CpuTime

from rayneuron.sim.workload import Arrival
from rayneuron.text.text import Text

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "examples" / "bench"
SCRIPTS = ("engine.py", "serving.py", "serving_peers.py", "scheduling.py", "start.py", "prefix.py", "pools.py", "speculation.py")
SCRIPTS += ("dialects.py", "host.py", "structured.py", "simulated.py", "gateway.py", "lora.py")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True, env=env, timeout=200)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_nothing_and_is_quick(script: str) -> None:
    done = subprocess.run([sys.executable, str(BENCH / script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "usage:" in done.stdout and "--json" in done.stdout


@pytest.mark.slow
def test_engine_from_end_to_end(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    sizes = ["--batch", "1", "3", "--prefill", "40", "--prompt", "9", "--new", "5", "--rounds", "2", "--threads", "1"]
    done = run("engine.py", "--model", str(tiny), "--dtype", "fp32", *sizes, "--json", str(out))
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert set(document["rates"]) == {"prefill 40", "decode 1", "decode 3"}
    for rates in document["rates"].values():
        assert {name: len(of_rounds) for name, of_rounds in rates.items()} == {"rayneuron fp32": 2, "transformers fp32": 2}
        assert all(r > 0 for of_rounds in rates.values() for r in of_rounds)
    assert all(len(of_rounds) == 2 and min(of_rounds) > 1e8 for of_rounds in document["roofline"].values())
    assert "| transformers fp32 |" in done.stdout and "| decode 3" in done.stdout and "Memory is read at" in done.stdout


def test_a_peer_without_its_environment_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"rayneuron": engine.Peer("peer_rayneuron.py"), "vllm": engine.Peer("peer_vllm.py", "no-such-environment")}
    assert engine.present(list(known), known) == ["rayneuron"]
    assert "vllm is left out: there is no" in capsys.readouterr().err


FRAIL = """
import json, os, sys
for i, line in enumerate(sys.stdin):
    if i == int(sys.argv[1]):
        os.abort()
    command = json.loads(line)
    steps = [(0.5, [1] * len(command.get("prompts", ()))), (1.0, [2] * len(command.get("prompts", ())))]
    rates = {"read_bytes_s": 1e9, "bf16_ops_s": 1e9, "int8_ops_s": 1e9}
    print(json.dumps({"steps": steps, "load_s": 0.1, **rates}), flush=True)
"""


def test_a_peer_that_dies_is_left_out_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    lives = {"rayneuron": 99, "openvino": 3, "vllm": 99, "llamacpp": 0}  # commands each answers before it aborts
    lives["roofline"] = 99
    children = {name: engine.Child(name, [sys.executable, "-c", FRAIL, str(n)], os.environ) for name, n in lives.items()}
    roofline, measured = children.pop("roofline"), engine.Measured()
    wanted = [engine.Case("prefill 4", 1, 4, 1), engine.Case("decode 2", 2, 4, 2)]
    try:
        engine.measure(measured, children, roofline, wanted, 2, 100)
    finally:
        for child in (*children.values(), roofline):
            child.close()
    for case in ("prefill 4", "decode 2"):
        assert {name: len(rates) for name, rates in measured.rates[case].items()} == {"rayneuron": 2, "vllm": 2}
    assert measured.lost == {"openvino": "openvino ended", "llamacpp": "llamacpp ended"}
    shown = engine.show(measured, list(children), {}, engine.verdicts.Model(1, 1, 1))
    assert "| died" in shown and "Left out: openvino ended" in shown and "(vllm)" in shown
    assert "llamacpp is left out from here on" in capsys.readouterr().err


def test_our_own_death_ends_the_run() -> None:
    with pytest.raises(engine.ChildFailed, match="rayneuron ended"):
        engine.Measured().lose("rayneuron", engine.ChildFailed("rayneuron ended; its log ends with:"))


def test_an_unknown_peer_is_refused() -> None:
    done = run("engine.py", "--peers", "vlm")
    assert done.returncode == 2 and "unknown peer vlm; known: rayneuron, transformers, openvino, vllm" in done.stderr


def test_admission_counts_every_gap_of_every_stream(tiny: Path) -> None:
    said = {"dtype": "fp32", "threads": 1, "max_num_seqs": 4, "max_model_len": 320, "prefill_chunk_tokens": 64, "prefill_chunk_ms": 0}
    opened = scheduling.open_engine(str(tiny), **said)
    measured = scheduling.Admission()
    scheduling.admit_while_decoding(opened, streams=3, prompt=150, seed="x", into=measured)
    # 150 tokens are chunks of 64, 64 and 22; a decode step of all three streams lies between two chunks, and one may come first.
    assert len(measured.chunks_s) == 3 and len(measured.first_token_s) == 1
    assert len(measured.gaps_s) in (2 * 3, 3 * 3)
    assert max(measured.gaps_s) >= min(measured.chunks_s), "a gap holds a chunk"
    assert sum(measured.chunks_s) <= measured.first_token_s[0]
    opened.close()


def test_host_steps_are_timed_apart(tiny: Path) -> None:
    spent = scheduling.host_step(str(tiny), rows=4, steps=7)
    assert {name: len(values) for name, values in spent.items()} == {"plan": 7, "pack": 7, "commit": 7, "together": 7}
    for whole, *parts in zip(spent["together"], spent["plan"], spent["pack"], spent["commit"], strict=True):
        assert whole == pytest.approx(sum(parts)) and min(parts) > 0


def test_prefixes_are_measured_by_hand_and_by_counting(tiny: Path) -> None:
    """One small round: what is found costs its own tokens alone, and the table says what the numbers say."""
    said = {"dtype": "fp32", "threads": 1, "max_num_seqs": 16, "max_model_len": 1120}
    engines = {name: scheduling.open_engine(str(tiny), **said, enable_prefix_caching=name == "on") for name in ("on", "off")}
    found = prefix.Measured()
    prefix.measure_hits(engines["on"], 640, "0", found)
    prefix.measure_misses(engines, 16, 0, found)
    found.computed = prefix.count_computed(engines["on"])
    assert found.computed == 1024 + 16 * 32 and prefix.count_computed(engines["off"]) == 16 * (1024 + 32)
    assert {kind: len(values) for kind, values in found.first_s.items()} == dict.fromkeys(prefix.KINDS, 1)
    found.first_s = {"new": [0.5], "nine tenths known": [0.1], "known whole": [0.012]}
    found.step_s, found.rates["decode"] = [0.01], {"on": [99.0], "off": [110.0]}
    text = prefix.show(found)
    assert re.search(r"nine tenths known / new +\| 0.20 +\| <= 0.15 +\| MISSED", text), text
    assert re.search(r"beyond a decode step, ms +\| 2.00", text) and re.search(r"decode, nothing known, on / off +\| 0.90 .*MISSED", text)
    for opened in engines.values():
        opened.close()


def test_an_engine_and_the_simulator_have_the_same_requests(tiny: Path) -> None:
    """As many tokens, and no more time for a step; whoever is further away hears of it later, by as much."""
    opened = scheduling.open_engine(str(tiny), dtype="fp32", threads=1, max_num_seqs=4, max_model_len=256)
    requests = simulated.arrivals(opened.capacity, 200.0, 30, 40, 6, seed=1)
    assert opened.timing is not None
    what = opened.capacity, opened.timing.profile(), opened.scheduler.caching
    opened.close()
    said, alone = (simulated.simulated(*what, 0.0, some) for some in (requests, requests[:1]))
    assert 0 < alone["ttft"] <= alone["whole"] < 2 * said["whole"] and said["rate"] > 0
    far = simulated.simulated(*what, 0.2, requests[:1])
    for name in ("ttft_mean", "whole_mean"):
        assert far[name] == pytest.approx(alone[name] + 400.0), name


async def test_requests_are_sent_at_their_times() -> None:
    """However long the replies of those before take."""
    came, all_ = list[float](), asyncio.Event()

    async def slow(method: str, path: str, sent: bytes, writer: asyncio.StreamWriter) -> bool:
        came.append(time.perf_counter())
        if len(came) == 3:
            all_.set()
        await asyncio.wait_for(all_.wait(), 60)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n")
        return False

    requests = [Arrival(i, 0.1 * i, 8, 3) for i in range(3)]
    async with Fake(slow) as fake:
        began = time.perf_counter()
        replies = await simulated.run_server(fake.url, requests, ["a", "b", "c"])
    assert all(at >= began + 0.1 * i for i, at in enumerate(came))
    assert not any(reply.error for reply in replies)


def test_short_calls_tell_the_way_and_what_one_takes_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of each comes late; tokens do where another stream is there."""
    asked: list[list[str]] = []

    async def served(url: str, requests: list[Arrival], texts: list[str]) -> list[Reply]:
        asked.append(texts)
        assert [one.at_s for one in requests] == [0.0] * len(texts)
        return [Reply(10.0, [10.05 + 0.03 * len(texts) * i for i in range(3)], 11.0, 3) for _ in texts]

    monkeypatch.setattr(simulated, "run_server", served)
    assert simulated.alone("http://x", ["a", "b", "c", "d"], 2) == pytest.approx((0.05, 2.0))
    assert asked == [["a"], ["b"], ["c"], ["d"], ["a", "b"], ["c", "d"]]


def test_what_is_off_is_said_of_medians_and_means() -> None:
    replies = [Reply(10.0, [10.1, 10.12, 10.14], 10.15, 3), Reply(11.0, [11.3, 11.32, 11.34], 12.0, 3)]
    real = simulated.actual(replies)
    means = {"ttft_mean": 200.0, "itl_mean": 20.0, "whole_mean": 575.0, "rate": 3.0}
    assert real == pytest.approx({"ttft": 100.0, "itl": 20.0, "whole": 150.0, **means}, rel=0.01)
    close = {**real, "ttft": 0.95 * real["ttft"], "itl": 1.15 * real["itl"]}
    text = simulated.show([{"server": real, "simulated": close, "opened": real}])
    assert re.search(r"first token, ms: off by +\| 0.05 +\| <= 0.1 +\| met", text), text
    assert re.search(r"from token to token, ms: off by +\| 0.15 +\| <= 0.1 +\| MISSED", text), text


def test_prompts_are_exact_and_repeatable(smollm2: Path) -> None:
    words = prompts.Words(Text(smollm2))
    text, ids = words.prompt(128, "a")
    assert len(ids) == 128 and Text(smollm2).encode(text) == ids
    assert words.prompt(128, "a") == (text, ids) and words.prompt(128, "b")[1] != ids


def test_serving_summary_by_hand() -> None:
    reply = Reply(sent_s=0.0, stamps=[0.1 + i * 0.01 for i in range(100)], ended_s=2.0, tokens=100)
    level = serving.Level(1, 100, loads=[Load([reply], wall_s=2.0, client_cpu_s=0.0)], offline_tok_s=[62.5])
    # In these 2 s: proxy 0.12, replica 1.9 of which 1.8 compute, idle use of each 0.01 a second; steps took 0.9 s on 2 threads.
    level.cpu = [(CpuTime(1.0, 1.0, 1.0, 0.0), CpuTime(1.12, 2.9, 2.8, 0.3))]
    level.prefill = (0.09, 1.0)
    level.idle, level.step_s, level.others = CpuTime(0.01, 0.01, 0.0, 0.1), 0.9, [0.25]
    summary = level.summary(threads=2)
    assert summary["share_of_offline"] == pytest.approx(50 / 62.5)
    assert summary["proxy_us_per_token"] == pytest.approx(1000.0)
    assert summary["replica_us_per_token"] == pytest.approx(800.0)
    assert summary["outside_compute_us_per_token"] == pytest.approx(1800.0)
    assert summary["outside_step_us_per_token"] == pytest.approx(1800.0)
    assert summary["rest_us_per_token"] == pytest.approx(1000.0)
    bars = {name: (measured, verdict) for name, measured, _, verdict in serving.bars({1: summary}, "plain")}
    assert bars["mean TTFT beyond the same requests' prefill at 1 client, ms"] == (pytest.approx(10.0), "met")
    short = replace(level, new=50, cpu=[(CpuTime(1.0, 1.0, 1.0, 0.0), CpuTime(1.08, 2.9, 2.8, 0.3))])
    short.loads = [Load([replace(reply, tokens=50)], wall_s=2.0, client_cpu_s=0.0)]  # 0.14 s, and 0.18 s with 50 tokens more
    assert serving.apart(short, level, 2) == "CPU outside the compute threads at 1 clients: 800 µs a token and 100.0 ms a request"


def test_cpu_a_token_is_held_against_the_code_before() -> None:
    now, before = ({16: {"share_of_offline": 0.95, "outside_compute_us_per_token": us}} for us in (80.0, 160.0))
    met = [(0.95, ">= 0.9", "met"), (80.0, "<= 100", "met"), (0.5, "<= 1", "met")]
    assert [row[1:] for row in serving.bars(now, "fast", before)] == met
    assert [row[3] for row in serving.bars(before, "fast", now)] == ["met", "MISSED", "MISSED"] and len(serving.bars(now, "fast")) == 2


def test_servers_are_compared_round_by_round() -> None:
    """The machine was half as fast in the second round: both sides of a ratio saw it."""
    rates = {"rayneuron fast": [600.0, 300.0, 600.0], "ray.serve.llm": [300.0, 150.0, 400.0], "vllm": [500.0, 250.0, 500.0]}
    summaries = {name: {16: {"output_tok_s": values}} for name, values in rates.items()}
    assert [(row[0], pytest.approx(row[1]), row[3]) for row in serving_peers.bars(summaries)] == [
        ("16 clients: tok/s of rayneuron fast / ray.serve.llm", 2.0, "met"),
        ("16 clients: tok/s of rayneuron fast / vllm", 1.2, "met"),
    ]


def test_servers_without_their_environment_are_left_out_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = serving_peers.parse_args(["--venvs", str(tmp_path)])
    assert serving_peers.present(args) == ["rayneuron plain", "rayneuron fast"]
    assert "ray.serve.llm is left out: there is no" in capsys.readouterr().err


async def test_a_server_is_ready_when_a_token_came() -> None:
    """200 on other paths says nothing: the first token is waited for, refusals and all."""
    asked: list[str] = []

    async def handler(method, path, body, writer) -> bool:
        asked.append(path)
        if len(asked) < 3:
            writer.write(b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n")
        return False

    class Server(serving_peers.Server):
        def __init__(self, url: str) -> None:
            self.url, self.started_s = url, time.perf_counter()

        def check(self) -> None:
            return

    async with Fake(handler) as fake:
        assert 0.2 <= await serving_peers.first_token(Server(fake.url)) < 60
    assert asked == ["/v1/completions"] * 3


LOG = """\
2026-11-28 00:09:58,983	INFO scripts.py:489 -- Running config file: '/tmp/x/deployment.yaml'.
2026-11-28 00:10:02,778	INFO worker.py:2029 -- Started a local Ray instance. View the dashboard at http://127.0.0.1:8265
INFO 2026-11-28 00:10:04,147 serve 20418 -- Started Serve in namespace "serve".
(ServeController pid=20788) INFO 2026-11-28 00:10:06,031 controller 20788 -- Imported and built app 'bench' successfully.
(ServeReplica:bench:EngineServer pid=20870) INFO 2026-11-28 00:10:07,747 bench_EngineServer 7yuyh672 -- bench: starting
(ServeReplica:bench pid=20870) INFO 2026-11-28 00:10:12,800 -- bench: ready after 5.1 s (import 0.0 s, weights 0.4 s, graphs 2.7 s)
"""


def test_start_reads_its_parts_from_the_log() -> None:
    import datetime

    began = datetime.datetime(2026, 11, 28, 0, 9, 58).timestamp()
    parts = start.log_parts(LOG, began)
    assert [round(seconds, 3) for seconds in parts.values()] == [0.983, 4.778, 6.147, 8.031, 9.747, 14.8]
    assert list(parts) == [name for name, _ in start.PARTS]
    assert start.log_parts(LOG.replace("Started Serve", "x"), began).keys() == parts.keys() - {"Serve started"}


async def test_parts_of_a_command_count_when_they_are_seen(tmp_path: Path) -> None:
    class Server:
        log_path, started_s = tmp_path / "log", time.perf_counter()

    found, lines = start.Start(), [text for _, text in start.COMMAND_PARTS]
    Server.log_path.write_text("")
    seeing = asyncio.create_task(start.see_parts(Server(), found))
    for number in range(len(lines)):
        Server.log_path.write_text("\n".join(lines[: number + 1]))
        while len(found.parts_s) <= number:
            await asyncio.sleep(0.01)
    await seeing
    seconds = list(found.parts_s.values())
    assert list(found.parts_s) == [name for name, _ in start.COMMAND_PARTS] and sorted(seconds) == seconds
    found.first_token_s, found.first_ttft_s, found.warm_ttft_s, found.ready_s = 5.5, 0.06, [0.05], dict.fromkeys(start.READY_PATHS, 5.4)
    text = start.show([found], [4.2])
    assert "first 200 after 4.2 s" in text and re.search(r"rayneuron serve to first token, s +\| 5.50 +\| <= 6 +\| met", text), text


def test_ready_too_early_is_a_missed_bar() -> None:
    honest = start.Start(first_token_s=9.0, first_ttft_s=0.06, warm_ttft_s=[0.05, 0.05, 0.06])
    early = start.Start(first_token_s=9.0, first_ttft_s=4.0, warm_ttft_s=[0.05, 0.05, 0.06])
    assert honest.honest and not early.honest
    assert [row[3] for row in start.bars([honest])] == ["met", "met"]
    assert [row[3] for row in start.bars([honest, early])] == ["met", "MISSED"]


METRICS = b"""\
# TYPE rayneuron:startup_seconds gauge
rayneuron:startup_seconds{engine="0",model_name="bench",part="weights"} 0.4
rayneuron:startup_seconds{engine="0",model_name="bench",part="graphs"} 2.7
rayneuron:startup_seconds_of_another{engine="0",model_name="bench",part="x"} 9
"""


async def test_the_first_200_is_answered_with_a_token() -> None:
    """A server that refuses first, then is ready: `measure` sees the moment and asks at once."""
    asked: list[str] = []

    async def handler(method, path, body, writer) -> bool:
        asked.append(path)
        if method == "POST":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n")
        elif path == "/metrics":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(METRICS) + METRICS)
        else:
            ready = len(asked) > 4
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % (b"200 OK" if ready else b"503 Loading"))
        return False

    class Server(start.Server):
        def __init__(self, url: str) -> None:
            self.url, self.started_s = url, 0.0

        def check(self) -> None:
            return

    async with Fake(handler) as fake:
        measured = await start.measure(Server(fake.url), parts=False)
    assert set(measured.ready_s) == {"/health", "/v1/models"} and sum(measured.refused.values()) == 4
    assert asked.count("/v1/completions") == 1 + start.WARM_REQUESTS
    assert measured.engine_s == {"weights": 0.4, "graphs": 2.7}
    assert measured.first_ttft_s > 0 and len(measured.warm_ttft_s) == start.WARM_REQUESTS


def test_the_link_of_the_gateway_s_bench_carries_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "STEPS", 4)  # it asserts itself that none is missing
    step, token = asyncio.run(gateway.link())
    assert step[1] > 0 and token[1] == step[1] / gateway.STREAMS
