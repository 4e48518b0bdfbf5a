"""rayneuron simulate: from a deployment and a trace to figures, and what it says of wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
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
        assert found["left_out"] == {"requests": left_out, "longest": longest, "max_model_len": length}


def test_equal_seeds_and_more_engines(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    made_up = [*made[:4], "--requests", "50", "--prompt-tokens", "50", "--output-tokens", "10", "--rate", "5"]
    for more in ([], [], ["--nodes", "2", "--route", "turns", "--exact"]):
        assert main([*made_up, *more]) == 0
    told = [text for text in capsys.readouterr().out.split("50 requests") if text]
    assert told[0] == told[1] != told[2]


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
        (["--fault", "kill:some@3"], "--fault kill:some@3: write kill:N@S"),
        (["--fault", "kill:²@3"], "--fault kill:²@3: write kill:N@S"),
        (["--fault", "kill:1@²"], "--fault kill:1@²: write kill:N@S"),
        (["--fault", "kill:0@3"], "--fault kill:0@3: write kill:N@S"),
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
