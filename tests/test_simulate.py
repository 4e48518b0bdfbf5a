"""rayneuron simulate: from a deployment and a trace to figures, and what it says of wrong ones."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rayneuron import deployment_file
from rayneuron.cli import main
from rayneuron.models.config_json import read_config
from rayneuron.placement.fitting import capacity_of
from tests.policies.profiles import profile

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:{s:02}.5,{100 + s},{5 + s % 7}\n" for s in range(60))


@pytest.fixture
def made(tiny: Path, tmp_path: Path) -> list[str]:
    """A command that needs no engine: the profile is said."""
    config = next(iter(deployment_file.made(str(tiny), {}, {}).deployments.values()))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile(capacity_of(config, read_config(tiny)))))
    (tmp_path / "trace.csv").write_text(TRACE)
    return ["simulate", str(tiny), "--profile", str(tmp_path / "profile.json"), "--trace", str(tmp_path / "trace.csv")]


def test_a_trace(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert main([*made, "--nodes", "2", "--scale", "4", "--fault", "kill:1@5", "--json", str(figures)]) == 0
    assert capsys.readouterr().out.startswith("60 requests in ")
    found = json.loads(figures.read_text())
    assert found["finished"] == 60 and found["wrong"] == 0
    assert found["output_tokens"] == sum(5 + s % 7 for s in range(60)) and 0 < found["ttft"]["p50"] < 0.1


def test_what_does_not_fit_is_counted(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a trace with longer requests than the model takes, the others are simulated, as many as are asked for."""
    rows = [(100, 20), (9000, 5), (120, 30), (100, 8100), (7000, 9), (130, 10)]
    lines = [f"2023-11-16 18:15:{s:02}.5,{prompt},{output}" for s, (prompt, output) in enumerate(rows)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    length = 4096  # what such a model is served with, where nothing is said
    for more, arrived, left_out in (([], 3, 3), (["--requests", "2"], 2, 1)):
        assert main([*made, *more, "--json", str(tmp_path / "figures.json")]) == 0
        longest = max(sum(row) for row in rows[: 3 if more else None])
        said = f"{left_out} more were left out: prompt and answer have more tokens than max_model_len {length}, up to {longest}\n"
        assert said in capsys.readouterr().out
        found = json.loads((tmp_path / "figures.json").read_text())
        assert found["arrived"] == found["finished"] == arrived
        assert found["left_out"] == {"requests": left_out, "longest": longest, "max_model_len": length, "cut": 0}


def test_equal_seeds_and_more_engines(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made_up = [*made[:4], "--requests", "50", "--prompt-tokens", "50", "--output-tokens", "10", "--rate", "5"]
    for more in ([], [], ["--nodes", "2", "--route", "turns", "--exact"]):
        assert main([*made_up, *more]) == 0
    told = [text for text in capsys.readouterr().out.split("50 requests") if text]
    assert told[0] == told[1] != told[2]


def test_records_and_figures_are_of_the_same_run(made: list[str], tmp_path: Path) -> None:
    """Percentiles are those that numpy finds, within the 1 % that a bin is wide; what was done and what it costs is what it adds up to."""
    figures, lines = tmp_path / "figures.json", tmp_path / "records.csv"
    more = ["--nodes", "2", "--seed", "3", "--requests", "400", "--rate", "1.5", "--instance", "inf2.xlarge", "--max-num-seqs", "4"]
    config = next(iter(deployment_file.made(made[1], {"max_num_seqs": 4}, {}).deployments.values()))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile(capacity_of(config, read_config(Path(made[1]))))))
    assert main([*made[:4], *more, "--slo-ttft-ms", "40", "--json", str(figures), "--records", str(lines)]) == 0
    found = json.loads(figures.read_text())
    with lines.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == found["finished"] == 400 and len({row["number"] for row in rows}) == 400
    for name, ours in (("ttft", "ttft_ms"), ("whole", "e2e_ms"), ("tpot", "tpot_ms")):
        values = np.array([float(row[ours]) for row in rows if name != "tpot" or int(row["output_tokens"]) > 1]) / 1e3
        assert found[name]["mean"] == pytest.approx(values.mean(), rel=1e-6) and found[name]["max"] == pytest.approx(values.max(), rel=1e-6)
        for part in (50, 90, 95, 99):
            assert found[name][f"p{part}"] == pytest.approx(np.percentile(values, part, method="inverted_cdf"), rel=0.0101), (name, part)
    tokens = sum(int(row["output_tokens"]) for row in rows)
    ended_s = max(float(row["at_s"]) + float(row["e2e_ms"]) / 1e3 for row in rows)
    good = [int(row["output_tokens"]) for row in rows if float(row["ttft_ms"]) <= 40]
    assert tokens == found["output_tokens"] and found["ended_s"] == pytest.approx(ended_s)
    assert found["output_tokens_per_s"] == pytest.approx(tokens / ended_s)
    assert found["slo"]["met"] == pytest.approx(len(good) / 400) and found["slo"]["goodput"] == pytest.approx(sum(good) / ended_s)
    assert found["usd_per_hour"] == 0.7582  # two engines on the two cores of one node
    assert found["usd_per_million"] == pytest.approx(0.7582 / 3600 * ended_s / tokens * 1e6)


def test_kinds_of_requests(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its share of the rate, its lengths and its account; sessions and beginnings are found again where prefixes are kept."""
    lines = tmp_path / "records.csv"
    kinds = ["account=a,share=3,prompt-tokens=20", "account=b,turns=4,prompt-tokens=40,prefixes=2,shared-tokens=64,output-tokens=30"]
    command = [*made[:2], *(word for kind in kinds for word in ("--traffic", kind)), "--rate", "20", "--requests", "800", "--seed", "5"]
    command += ["--profile", "guess", "--instance", "inf2.8xlarge", "--device", "neuron", "--max-model-len", "512", "--records", str(lines)]
    assert main(command) == 0
    assert "prompts begin alike, and no engine keeps prefixes: see --enable-prefix-caching true" in capsys.readouterr().out
    with lines.open() as file:
        rows = list(csv.DictReader(file))
    by = {name: [row for row in rows if row["account"] == name] for name in "ab"}
    assert len(by["a"]) == pytest.approx(600, rel=0.1) and np.mean([int(r["prompt_tokens"]) for r in by["a"]]) == pytest.approx(20, rel=0.1)
    assert all(int(r["prompt_tokens"]) > 64 for r in by["b"]) and 2 < len(by["b"]) / len({r["session"] for r in by["b"]}) <= 4
    assert max(float(r["at_s"]) for r in rows) == pytest.approx(40, rel=0.15)  # 800 at 20 a second
    assert main([*command, "--enable-prefix-caching", "true", "--block-size", "32", "--json", str(tmp_path / "f.json")]) == 0
    assert "see --enable" not in capsys.readouterr().out and json.loads((tmp_path / "f.json").read_text())["cached_tokens"] > 64 * 150


FILE = """
applications:
  - {name: one, route_prefix: null, import_path: "rayneuron.serve.app:build", args: {model: {path: MODEL, name: one}}}
  - name: two
    route_prefix: null
    import_path: rayneuron.serve.app:build
    args: {model: {path: MODEL, name: two}, max_num_seqs: 2, max_model_len: 256, serving: {num_replicas: 3}}
  - name: gateway
    route_prefix: /
    import_path: rayneuron.gateway.app:build
    args:
      models: [{application: one}, {application: two}]
      admission: {max_wait_s: 0.05}
      tenants: {greedy: {keys: ["env:A"], max_waiting: 1}}
      serving: {api_keys: ["env:B"]}
"""


def test_one_model_of_a_file_behind_the_gateway_it_has(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many engines as it says, and who may wait how long."""
    (tmp_path / "file.yaml").write_text(FILE.replace("MODEL", made[1]))
    command = ["simulate", str(tmp_path / "file.yaml"), "--profile", "guess", "--json", str(tmp_path / "f.json")]
    two = ["--application", "two", "--instance", "inf2.8xlarge", "--device", "neuron"]
    assert main([*command, *two, "--rate", "1", "--requests", "20"]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["engines"] == pytest.approx(3.0) and found["finished"] == 20
    assert f"{found['left_out']['cut']} of them were made up longer, and cut to max_model_len 256" in capsys.readouterr().out
    assert 10 < found["left_out"]["cut"] < 20
    loads = ["--traffic", "account=greedy", "--traffic", "account=other", "--output-tokens", "200", "--rate", "9000", "--requests", "900"]
    assert main([*command, *two, *loads]) == 0
    refused = json.loads((tmp_path / "f.json").read_text())["refused"]
    assert refused["account"] > 50 and refused["capacity"] > 50
    capsys.readouterr()
    for more, said in ((["--requests", "9"], "name it with --application: one, two"), (["--application", "gateway"], ": one, two")):
        assert main([*command, *more]) == 2
        assert said in capsys.readouterr().err


def test_what_a_pool_costs_is_by_its_own_cores(made: list[str], tmp_path: Path) -> None:
    figures = tmp_path / "f.json"
    command = [*made[:2], "--profile", "guess", "--instance", "inf2.24xlarge", "--device", "neuron", "--requests", "30"]
    command += ["--max-model-len", "512", "--set=pools.prefill.tensor_parallel=2", "--set=pools.local_tokens=0", "--json", str(figures)]
    for nodes, prefill, price in ((12, 6, 2), (12, 7, 3), (1, 1, 2), (13, 6, 3)):
        assert main([*command, "--nodes", str(nodes), "--prefill-nodes", str(prefill)]) == 0
        assert json.loads(figures.read_text())["usd_per_hour"] == pytest.approx(price * 6.4906), (nodes, prefill)


def test_faults_are_over_when_they_are_said_to_be(made: list[str], tmp_path: Path) -> None:
    """Two engines of four are away for a quarter of a minute: there are 4 - 2 x 15 / length of the run. Flapping ones are away half the
    time; where no end is said, a start ends it."""
    figures = tmp_path / "f.json"
    command = [*made, "--nodes", "4", "--json", str(figures)]
    for more, away_s in (
        (["kill:2@20-35"], 30), (["flap:1@10-50"], 20), (["kill:1@10", "kill:1@30-40"], 20), (["kill:1@10", "--start-s", "3"], 3),
        (["kill:3@900"], 0), (["slow:4x1@10-900"], 0),
    ):  # fmt: skip
        assert main([*command, *(word for one in more for word in (["--fault", one] if ":" in one else [one]))]) == 0
        found = json.loads(figures.read_text())
        assert found["finished"] == 60 and found["engines"] == pytest.approx(4 - away_s / found["seconds"], abs=0.01), more
        assert found["seconds"] == found["ended_s"] < 60  # what comes after the last answer is no part of the run


def test_equal_seeds_are_equal_bytes_in_any_process(made: list[str], tmp_path: Path) -> None:
    told = []
    for number in ("1", "77"):
        out = [tmp_path / f"{number}.{kind}" for kind in ("json", "csv")]
        words = ["--nodes", "3", "--gateways", "2", "--fault", "flap:1@5-25", "--loss", "0.2", "--scale", "3"]
        command = [sys.executable, "-m", "rayneuron", *made, *words, "--json", str(out[0]), "--records", str(out[1])]
        run = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": number}, capture_output=True, check=True)
        told.append((run.stdout, *(path.read_bytes() for path in out)))
    assert told[0] == told[1]


def test_who_has_seen_enough_may_go(made: list[str], tmp_path: Path) -> None:
    """Ctrl-C says nothing more than that it was; what has ended until then is in the records."""
    lines = tmp_path / "records.csv"
    words = ["--repeat", "1000000", "--nodes", "4", "--scale", "100", "--records", str(lines), "--json", str(tmp_path / "f.json")]
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a job in the background hears none
    heard += "from rayneuron.cli import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen([sys.executable, "-c", heard, *made, *words], stderr=subprocess.PIPE) as run:
        try:
            while not lines.exists() or lines.stat().st_size < 10_000:
                assert run.poll() is None
            run.send_signal(signal.SIGINT)
            assert run.wait(20) == 130 and run.stderr is not None
        finally:
            run.kill()
        assert b"Traceback" not in run.stderr.read() and not (tmp_path / "f.json").exists()
    assert len(lines.read_text().splitlines()) > 100


POOLS = ["--set", "pools.local_tokens=0", "--set", "max_num_seqs=4"]
SCALED = [f"--set=serving.autoscaling.{key}" for key in ("max_replicas=3", "policy.policy_function=rayneuron.serve.scaler:TokenLoad")]


def test_pools_and_autoscaling(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with pools sends its prompts there; one with autoscaling has as many engines as its policy wants."""
    config = next(iter(deployment_file.made(made[1], {"max_num_seqs": 4}, {}).deployments.values()))
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(profile(capacity_of(config, read_config(Path(made[1]))))))
    figures = tmp_path / "figures.json"
    assert main([*made, *POOLS, "--prefill-nodes", "2", "--json", str(figures)]) == 0
    assert "60 prompts were computed by the prefill pool" in capsys.readouterr().out
    assert json.loads(figures.read_text())["pooled"] == 60
    assert main([*made, *POOLS, "--set=pools.prefill.serving.autoscaling.max_replicas=3", "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())["pooled"] == 60 and 1.0 <= json.loads(figures.read_text())["prefill_engines"] <= 3.0
    fast = [*SCALED, "--set=serving.autoscaling.upscale_delay_s=0", "--set=serving.autoscaling.policy.policy_kwargs={target_ms: 1}"]
    assert main([*made, "--set", "max_num_seqs=4", *fast, "--start-s", "1", "--scale", "60", "--json", str(figures)]) == 0
    assert 1.0 <= json.loads(figures.read_text())["engines"] <= 3.0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--prefill-nodes", "2"], "--prefill-nodes: the file has no pools"),
        (["--set", "serving.autoscaling.max_replicas=3"], "only rayneuron.serve.scaler:TokenLoad is simulated"),
        (["--trace", "no.csv"], "no.csv"),
        (["--nodes", "0"], "--nodes 0: write 1 or more"),
        (["--gateways", "0"], "--gateways 0: write 1 or more"),
        (["--nodes", "100000000000"], "engines: 100000000000, gateways: 1; before the first request they take "),
        (["--gateways", "100000000000"], "engines: 1, gateways: 100000000000; before the first request they take "),
        ([*POOLS, "--profile", "guess", "--instance", "inf2.xlarge", "--prefill-nodes", "9999999999"], "and 9999999999 that only"),
        (["--requests", "10000000000"], "--requests 10000000000: write 1000000000 or less"),
        (["--repeat", "10000000000"], "--repeat 10000000000: write 1000000 or less"),
        (["--requests", "-1"], "--requests -1: write 1 or more"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0: write 1 or more"),
        (["--late-ms", "nan"], "--late-ms nan: write 0 or more"),
        (["--scale", "0"], "--scale 0: write a number above 0"),
        (["--burstiness", "nan"], "--burstiness nan: write a number above 0"),
        (["--loss", "1"], "--loss 1: write a share below 1"),
        (["--loss", "-0.1"], "--loss -0.1: write 0 or more"),
        (["--hop-ms", "-1"], "--hop-ms -1: write 0 or more"),
        (["--rate", "5"], "--rate says nothing of "),
        (["--burstiness", "2"], "--burstiness says nothing of "),
        (["--prompt-tokens", "5"], "--prompt-tokens says nothing of --trace"),
        (["--traffic", "account=a"], "--traffic says nothing of --trace"),
        (["--fault", "kill:some@3"], "--fault kill:some@3: write kill:N@S"),
        (["--fault", "kill:²@3"], "--fault kill:²@3: write kill:N@S"),
        (["--fault", "kill:1@²"], "--fault kill:1@²: write kill:N@S"),
        (["--fault", "kill:0@3"], "--fault kill:0@3: write kill:N@S"),
        (["--fault", "flap:1@3"], "--fault flap:1@3: write kill:N@S"),
        (["--fault", "kill:1@9-3"], "--fault kill:1@9-3: it ends before it begins"),
        (["--fault", "slow:1@3-4"], "--fault slow:1@3-4: write kill:N@S"),
        (["--fault", "kill:1x2@3-4"], "--fault kill:1x2@3-4: write kill:N@S"),
        (["--fault", "slow:1x0@3-4"], "--fault slow:1x0@3-4: write how many times as long"),
        (["--fault", "kill:2@3"], "--fault kill:2@3: there are 1 engines; write fewer"),
        (["--records", "/"], "--records /: no file can be written there"),
        (["--profile", "no.json"], "no.json is no file. Its steps can be measured only where it runs."),
        (["--json", "/"], "--json /: no file can be written there"),
        (["--json", "/no/such/place.json"], "--json /no/such/place.json: no file can be written there"),
        ([*SCALED, "--set", "serving.autoscaling.policy.policy_kwargs={target_ms: 0}"], "target_ms: 0: write a number above 0"),
        ([*SCALED, "--set", "serving.autoscaling.policy.policy_kwargs={tokens: 9}"], "tokens: 9: write a number above 0 for target_ms"),
        (["--max-model-len", "64"], "profile.json was measured with"),
    ],
)
def test_what_is_wrong(made: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*made, *more]) == 2
    assert said in capsys.readouterr().err


def test_what_measures_nothing_needs_no_torch(made: list[str]) -> None:
    """Which takes seconds to import, and 200 MB."""
    without = "import sys; sys.modules['torch'] = None; from rayneuron.cli import main; sys.exit(main(sys.argv[1:]))"
    guess = [*made[:2], "--profile", "guess", "--instance", "inf2.xlarge", "--tensor-parallel", "1", "--max-model-len", "512"]
    size = ["size", made[1], "--max-model-len", "512", "--slo-ttft-ms", "1000", "--of", "inf2.xlarge", "--requests", "9"]
    for asked in (made, guess, size):
        ran = subprocess.run([sys.executable, "-c", without, *asked], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--repeat", "2"], "--repeat: is for a trace"),
        (["--traffic", "tokens=3"], "'tokens=3': write KEY=VALUE, each once, of account, prompt-tokens"),
        (["--traffic", "share=1,share=2"], "'share=2': write KEY=VALUE, each once"),
        (["--traffic", "share=nan"], "'share=nan': write a number above 0"),
        (["--traffic", "turns=1.5"], "'turns=1.5': write a whole number above 0"),
        (["--traffic", "prefixes=3"], "prefixes and shared-tokens go together"),
        (["--traffic", "prefixes=3,shared-tokens=999999"], "shared-tokens=999999: write less than max_model_len, "),
    ],
)
def test_requests_that_cannot_be_made_up(made: list[str], more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*made[:4], *more]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("a.csv", TRACE.splitlines()[0] + "\n"), ("m.jsonl", ""), ("m.jsonl", "\n\n")])
def test_a_trace_without_requests(made: list[str], tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(text)
    assert main([*made, "--trace", str(tmp_path / name)]) == 2
    assert "the trace has no request" in capsys.readouterr().err


def test_where_there_is_no_machine_to_measure_on(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a profile says how to get one."""
    assert main([*made[:2], "--device", "neuron", "--instance", "inf2.8xlarge", "--requests", "3"]) == 2
    assert "Without such a machine: --profile guess --instance inf2.48xlarge; else --profile FILE" in capsys.readouterr().err


def test_no_profile_at_all(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile.json").write_text("{}")
    assert main(made) == 2
    assert "leave --profile out, and one is measured here" in capsys.readouterr().err


def test_the_cheapest_size(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "sizes.json"
    trace = ["--trace", str(tmp_path / "trace.csv"), "--scale", "20", "--max-model-len", "512", "--json", str(figures)]
    goal = ["--slo-ttft-ms", "200", "--slo-tpot-ms", "50", "--of", "inf2.xlarge", "--of", "trn1.2xlarge", "--of", "trn2.3xlarge"]
    assert main(["size", made[1], *trace, *goal, "--price", "trn1.2xlarge=0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 x trn1.2xlarge tensor_parallel ") and "trn2.3xlarge: no price is known; write --price trn2.3xlarge=USD" in out
    assert "nobody's measurement" in out and "as said" in out
    found = json.loads(figures.read_text())
    assert found[0]["usd_per_hour"] == 0.5 and found[0]["report"]["finished"] == 60 and not found[0]["measured"]
    assert [one["usd_per_hour"] for one in found if "report" in one] == sorted(one["usd_per_hour"] for one in found if "report" in one)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "a size for what goal? write --slo-ttft-ms MS"),
        (["--slo-ttft-ms", "100", "--set", "pools.local_tokens=9"], "pools: sizes are of engines that do all"),
        (["--slo-ttft-ms", "40", "--scale", "900000", "--most", "1"], "1 nodes are not enough: "),
        (["--slo-ttft-ms", "0.001"], "The best that can be reached, by a request that is alone: first token "),
        (["--slo-ttft-ms", "100", "--most", "100000000000"], "before the first request they take "),
        (["--slo-ttft-ms", "100", "--slo-share", "2"], "--slo-share 2: write a share of all requests"),
        (["--slo-ttft-ms", "100", "--price", "inf3=2"], "unknown instance 'inf3'"),
        (["--slo-ttft-ms", "100", "--profile", "p.json"], "--profile p.json: say where it was measured with --instance"),
        (["--slo-ttft-ms", "100", "--profile", "p.json", "--instance", "trn1.2xlarge"], "trn1.2xlarge with tensor_parallel 1 is not"),
    ],
)
def test_sizes_that_cannot_be(made: list[str], tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", str(tmp_path / "trace.csv"), "--max-model-len", "512", "--of", "inf2.xlarge"]
    assert main(["size", made[1], *trace, *more]) == 2
    assert said in capsys.readouterr().err


def test_pictures_need_matplotlib(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both where it is there and where it is not."""
    picture = tmp_path / "figures.png"
    there = find_spec("matplotlib") is not None
    assert main([*made, "--plot", str(picture)]) == (0 if there else 2)
    if there:
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert "pip install 'rayneuron[plots]'" in capsys.readouterr().err and not picture.exists()
