"""The command line: what it prints, what it refuses and how. (`serve`: tests/serve/test_process.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayneuron import cli

SMOLLM2 = str(Path(__file__).parent.parent / "deployments" / "smollm2.yaml")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rayneuron", *words], capture_output=True, text=True, env={**os.environ, **environment}, timeout=400
    )


def test_version_names_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    said = capsys.readouterr().out
    assert "\ntorch 2." in said and "torch-neuronx not installed" in said


def test_demo_model_prints_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path))
    assert cli.main(["demo-model", "--random", "llama-tiny"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.parent == tmp_path / "models" and (folder / "config.json").is_file()
    assert cli.main(["demo-model", "--random", "tiny", "--out", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "mine")


def test_config_prints_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", SMOLLM2, "--set", "limits.max_waiting=3"]) == 0
    (entry,) = yaml.safe_load(capsys.readouterr().out)["applications"]
    printed = entry["args"]
    assert printed["limits"]["max_waiting"] == 3 and printed["tensor_parallel"] == 1 and printed["model"]["path"] == "demo:smollm2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "nowhere.yaml"], "rayneuron config: there is no file nowhere.yaml"),
        (["config", SMOLLM2, "--set", "max_num_seq=3"], "unknown key max_num_seq; did you mean max_num_seqs?"),
        (["serve", SMOLLM2, "--profile", "faster"], "rayneuron serve: unknown profile 'faster'; write one of: plain, fast"),
        (["serve", SMOLLM2, "--set", "dtype=int3"], "dtype"),
        (["serve", SMOLLM2, "--root-path", "api"], "--root-path: http_options.root_path: must begin with / and not end with it, got 'api'"),
        (["serve", SMOLLM2, "--profile", "fast", "--ssl-certfile", "x"], "profile fast answers plain HTTP"),
        (["serve", "demo:smollm2", "--grace", "-5"], "rayneuron serve: --grace: must be a number of seconds, 0 or more, got -5"),
        (["serve", "demo:smollm2", "--grace", "nan"], "--grace: must be a number of seconds, 0 or more, got nan"),
        (["serve", "demo:smollm2", "--grace", "inf"], "--grace: must be a number of seconds, 0 or more, got inf"),
        (["serve", "s3://"], "rayneuron serve: 's3://' names no model; write a directory, org/name of a hub, s3://bucket/prefix"),
        (["demo-model", "--random", "7b"], "rayneuron demo-model: no random model has the size '7b'; write one of tiny"),
        (["demo-model", "--random", "tiny", "--dtype", "int4"], "dtype must be one of fp32, bf16, fp16, got 'int4'"),
        (["generate", "demo:smollm2", "--prompt", "x", "--max-tokens", "0"], "--max-tokens 0 has nothing to print; write 1 or more"),
        (["generate", "demo:smollm2", "--prompt", "a\udcff"], r"--prompt 'a\xff': it is not UTF-8: invalid start byte"),
        (["generate", "--prompt", "x"], "name a model: rayneuron generate demo:smollm2 ...; or set HF_MODEL_ID"),
        (["generate", "a", "--model", "b", "--prompt", "x"], "the model is named twice, 'a' and 'b'; leave one of them out"),
        (["check", "demo:smollm2", "--max-tokens", "0"], "--max-tokens must be at least 1, --tolerance a number from 0"),
        (["check", "demo:smollm2", "--tolerance", "nan"], "--max-tokens must be at least 1, --tolerance a number from 0"),
        (["shard", "demo:smollm2", "--tp", "0", "--out", "x"], "--tp: must be at least 1, got 0"),
        (["batch", __file__ + "l", "out", "demo:smollm2"], "No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize(
    ("command", "hint"), [("server", "; did you mean serve?"), ("smulate", "; did you mean simulate?"), ("x", "; known are batch, check,")]
)
def test_an_unknown_command_names_the_nearest(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "demo:smollm2"])
    said = capsys.readouterr()
    assert said.err.startswith(f"rayneuron: unknown command {command!r}{hint}") and said.err.count("\n") == 1 and said.out == ""


def test_plan_of_the_demo_and_of_a_whole_node(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", SMOLLM2, "--set", f"model.path={tiny}"]) == 0
    assert "smollm2 replica 0" in capsys.readouterr().out
    assert cli.main(["plan", SMOLLM2.replace("smollm2", "inf2_three_models")]) == 0
    printed = capsys.readouterr().out
    assert "inf2" in printed and "NEURON_RT_VISIBLE_CORES" in printed
    assert cli.main(["plan", SMOLLM2, "--instance", "inf2.huge"]) == cli.main(["plan", SMOLLM2, "--nodes", "0"]) == 2
    assert "--nodes: must be at least 1, got 0" in capsys.readouterr().err


def test_generate_answers_and_is_deterministic(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny), "--prompt", "hello", "--max-tokens", "9", "--set", "dtype=fp32", "--set", "max_model_len=64"]

    def said(*more: str) -> str:
        assert cli.main([*words, *more]) == 0
        return capsys.readouterr().out

    streamed = run(*words)
    assert streamed.returncode == 0 and streamed.stdout.strip(), streamed.stderr
    assert said("--prompt", "hello") == 2 * streamed.stdout
    assert said("--chat") != streamed.stdout, "the chat template is in the prompt"


def test_prompts_and_models_are_read_as_programs_write_them(tiny: Path) -> None:
    """A prompt in UTF-8 where the locale knows ASCII alone, whose letters are then printed as it can; vLLM's --model."""
    words = ["generate", "--model", str(tiny), "--prompt", "日本", "--max-tokens", "12", "--set", "dtype=fp32", "--set", "max_model_len=64"]
    done = run(*words)
    assert done.returncode == 0 and not done.stdout.isascii(), done
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    narrow = run(*words, **plain, PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0 and narrow.stdout.isascii() and "Traceback" not in narrow.stderr, narrow
    assert narrow.stdout.encode().decode("unicode_escape") == done.stdout


def test_a_batch_is_not_answered_into_its_own_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(line := '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    assert cli.main(["batch", str(file), str(tmp_path / "." / "in.jsonl"), "nowhere/at-all"]) == 2
    assert "would be written into the file of requests" in capsys.readouterr().err and file.read_text() == line
    assert cli.main(["batch", str(file), str(tmp_path / "no" / "out"), "nowhere/at-all"]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "batch", "check"])
def test_help_begins_with_a_short_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"usage: rayneuron {command} ") and said[0].endswith("[--KEY VALUE ...]") and said[1] == ""


def test_shard_and_quantize_write_what_loads_again(tiny: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    assert cli.main(["quantize", str(tiny), "--dtype", "int8", "--out", str(tmp_path / "int8")]) == 0
    with safe_open(tmp_path / "int8" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {f"model.layers.0.self_attn.q_proj.{part}" for part in ("weight", "scale")} <= names
    assert cli.main(["shard", str(tmp_path / "int8"), "--tp", "2", "--out", str(tmp_path / "cut")]) == 0
    assert len(list((tmp_path / "cut").rglob("*.safetensors"))) == 2
    assert cli.main(["shard", str(tiny), "--tp", "2", "--scheme", "per_row", "--quantization", "int8", "--out", str(tmp_path / "x")]) == 2


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0 and "usage: rayneuron" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("rayneuron ")


@pytest.mark.parametrize("command", [["quantize"], ["shard", "--tp", "2"]])
def test_what_fails_half_way_leaves_nothing_in_the_way(
    command: list[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full once: one line, and the same command succeeds afterwards."""
    from rayneuron.models import hub

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    words = [*command[:1], str(tiny), *command[1:], "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(hub, "write_json", full)
        assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said and not list(tmp_path.iterdir())
    assert cli.main(words) == 0 and (tmp_path / "out" / "config.json").is_file()


def test_a_directory_nobody_may_write_into_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["demo-model", "--random", "tiny", "--out", str(tmp_path / "file" / "x")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("rayneuron demo-model: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ([], 0, "in fp32: within 0.001 nats of transformers"),
        (["--tensor-parallel-size", "2"], 0, "in fp32: within 0.001 nats of transformers"),
        (["--quantization", "int8"], 0, "quantised, so judged only where --tolerance is given"),
        (["--quantization", "int8", "--tolerance", "0.001"], 2, "in fp32 is further than 0.001 from transformers at 'Hello"),
    ],
)
def test_check_compares_with_transformers(tiny: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: int, says: str) -> None:
    words = ["check", str(tiny), "--dtype", "fp32", "--max-model-len", "128", "--prompt", "Hello there", "--max-tokens", "12", *more]
    assert cli.main(words) == code
    said = capsys.readouterr()
    assert says in (said.err if code else said.out) and "'Hello there'" in said.out
