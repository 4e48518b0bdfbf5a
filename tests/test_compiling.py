"""`rayneuron compile`: the same command for both devices; what it writes is loaded elsewhere without compiling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rayneuron import LLM, SamplingParams, cli
from rayneuron.deployment_file import IMPORT_PATH
from tests.devices.neuron.conftest import cold, compiled_once, standin, standin_modules  # noqa: F401

ARGS = {
    "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
}  # fmt: skip


def written(folder: Path, model: Path, **args) -> Path:
    path = folder / "deployment.yaml"
    application = {"name": "one", "import_path": IMPORT_PATH, "args": {"model": {"path": str(model)}, **ARGS, **args}}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def test_neuron(cold: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Compiling takes no cores; another node loads the folder with its cores, and computes."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    file, out = written(cold, tiny, device="neuron", tensor_parallel=2), cold / "out"
    assert cli.main(["compile", str(file), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "5 graphs:" in said and "decode        1  b2_t1_l64_sampled_logits_last" in said and "kv_export" in said
    assert "MiB of weights and" in said and said.rstrip().endswith(str(out))
    assert json.loads((out / "neuron_config.json").read_text())["neuron_config"]["context_encoding_buckets"] == [16]
    shutil.rmtree(cold / "cache")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0,1")
    with LLM(str(tiny), device="neuron", tensor_parallel=2, compile={"artifact": str(out), "required": True}, **ARGS) as llm:
        got = llm.generate(["x"], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids
    kept = [len(list((cold / "cache").rglob(name))) for name in ("manifest.json", "profile.json")]
    assert kept[0] == kept[1] > 0, "step times, and no graph"
    with LLM(str(tiny), **ARGS) as cpu:
        assert got == cpu.generate(["x"], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids
    assert cli.main(["compile", str(file), "--out", str(out)]) == 2
    assert f"{out} exists and is not empty" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU's kernels need a C++ compiler")
def test_cpu(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels of the CPU go through the same cache, command and folder: others than the tests have, hence compiled, and quickly."""
    from rayneuron import devices
    from rayneuron.devices.cpu import library

    monkeypatch.setattr(library, "FLAGS", tuple("-O0" if flag == "-O2" else flag for flag in library.FLAGS))
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "first"))
    out = tmp_path / "out"
    assert cli.main(["compile", str(written(tmp_path, tiny)), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "one library of C++ kernels" in said
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["kind"] == "cpu-kernels" and manifest["files"]
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "second"))
    import torch

    devices.open("cpu", ahead=devices.Ahead(artifact=out), dtype=torch.float32).close()
    assert (tmp_path / "second" / "native" / manifest["digest"] / "manifest.json").is_file()
    assert cli.main(["compile", str(tmp_path / "none.yaml")]) == 2
