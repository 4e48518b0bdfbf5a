"""What a replica would refuse is refused before anything is loaded: in a file, with its line, without torch, transformers or Ray."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayneuron import cli, preflight
from rayneuron.config import parse
from rayneuron.errors import RayNeuronError

INDEX = "model.safetensors.index.json"
HEAVY = ("torch", "transformers", "ray", "numpy")


def removed(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names] and None


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def edited(name: str, **changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changed}))

    return change


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def nothing(folder: Path) -> None:
    return None


# what is done to a good model directory, the args beside model.path, what is said, the key whose line it is
WRONG: dict[str, tuple[Callable[[Path], None], dict[str, Any], str, str]] = {
    "no directory": (shutil.rmtree, {}, "is not a directory", "path"),
    "no config": (removed("config.json"), {}, "config.json does not exist", "path"),
    "config is no JSON": (replaced("config.json", "{"), {}, "config.json cannot be read as JSON", "path"),
    "unknown family": (edited("config.json", model_type="lama"), {}, "did you mean 'llama'?", "path"),
    "no weights": (removed("model.safetensors"), {}, "holds neither model.safetensors nor", "path"),
    "weights cut short": (truncated, {}, "is truncated: tensor", "path"),
    "weights are text": (replaced("model.safetensors", "<html>not found</html>"), {}, "download it again", "path"),
    "index without a map": (replaced(INDEX, "{}"), {}, "has no weight_map", "path"),
    "index names what is absent": (replaced(INDEX, '{"weight_map": {"a": "b.safetensors"}}'), {}, "does not exist", "path"),
    "no tokenizer": (removed("tokenizer.json"), {}, "holds no tokenizer.json", "path"),
    "tokenizer is no tokenizer": (replaced("tokenizer.json", "{}"), {}, "no tokenizer could be read", "path"),
    "tokenizer elsewhere": (nothing, {"model": {"tokenizer": "/no/such"}}, "'/no/such' is not a directory", "tokenizer"),
    "draft model": (nothing, {"speculative_config": {"model": "/no/such"}}, "speculative_config.model: '/no/such' is not a dir", "model"),
    "adapter": (nothing, {"lora": {"lora_modules": {"a": "/no/such"}}}, "lora.lora_modules.a: /no/such is no directory", "a"),
    "adapter of a hub": (nothing, {"lora": {"lora_modules": {"a": "org/a"}}}, "`hf download org/name` fetches one", "a"),
    "no adapter": (nothing, {"lora": {"lora_modules": {"a": "/"}}}, "lora.lora_modules.a: / is no adapter", "a"),
    "artifact": (nothing, {"compile": {"artifact": "/no/such"}}, "compile.artifact means nothing on device cpu", "artifact"),
    "template file": (nothing, {"model": {"chat_template": "/no/such.jinja"}}, "neither a template nor a readable file", "chat_template"),
    "template syntax": (nothing, {"model": {"chat_template": "{% if %}"}}, "is not a Jinja template", "chat_template"),
    "generation_config is a list": (replaced("generation_config.json", "[]"), {}, "generation_config.json holds no JSON object", "path"),
    "generation_config value": (replaced("generation_config.json", '{"temperature": 9}'), {}, "sampling defaults: temp", "path"),
    "temperature": (nothing, {"sampling_defaults": {"temperature": 9}}, "sampling_defaults.temperature", "temperature"),
    "type of a default": (nothing, {"sampling_defaults": {"max_tokens": "x"}}, "sampling_defaults", "max_tokens"),
    "outside the vocabulary": (nothing, {"sampling_defaults": {"stop_token_ids": [999999]}}, "out of the vocabulary", "stop_token_ids"),
    "min_tokens beyond the length": (nothing, {"sampling_defaults": {"min_tokens": 10**6}}, "min_tokens", "min_tokens"),
    "a word that is no template's": (
        nothing, {"serving": {"default_chat_template_kwargs": {"tools": []}}}, "default_chat_template_kwargs.tools is not for", "tools",
    ),
    "too long": (nothing, {"max_model_len": 10**6}, "beyond the model's", "max_model_len"),
    "too many ranks": (nothing, {"tensor_parallel": 64}, "attention heads", "tensor_parallel"),
    "too many stages": (nothing, {"pipeline_parallel": 64}, "leaves a stage without any", "pipeline_parallel"),
    "memory": (nothing, {"max_num_seqs": 10**7}, "write a smaller max_num_seqs", "max_num_seqs"),
    "buckets": (nothing, {"buckets": {"batch": [999]}}, "beyond max_num_seqs", "batch"),
    "quantization": (nothing, {"quantization": "int7"}, "one of int8", "quantization"),
    "kv_dtype": (nothing, {"kv_dtype": "int8"}, "write f8e4m3", "kv_dtype"),
    "heads": (nothing, {"group_query_attention": "shard-over-batch"}, "replicated-heads", "group_query_attention"),
    "device": (nothing, {"device": "nueron"}, "write neuron", "device"),
    "no device": (nothing, {"device": "null"}, "write one of cpu, neuron", "device"),
    "another device's keys": (nothing, {"compile": {"flags": "-O1"}}, "compile.flags means nothing on device cpu", "flags"),
    "instance": (nothing, {"instance": "inf2.huge"}, "known are inf2.xlarge", "instance"),
    "nodes": (nothing, {"nodes": 3}, "does not divide equally", "nodes"),
    "key not set": (nothing, {"serving": {"api_keys": ["env:NO_SUCH_KEY"]}}, "NO_SUCH_KEY", "api_keys"),
    "key file": (nothing, {"serving": {"api_keys": ["file:/no/such"]}}, "cannot be read: No such file", "api_keys"),
}  # fmt: skip


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(tiny, target)
    return target


def written(folder: Path, model: Path, args: dict[str, Any]) -> Path:
    path = folder / "file.yaml"
    args = {**args, "model": {"path": str(model), **args.get("model", {})}}
    entry = {"name": "one", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
    path.write_text(yaml.safe_dump({"applications": [entry]}, sort_keys=False))
    return path


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_line(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, args, says, key = WRONG[name]
    change(model)
    path = written(tmp_path, model, args)
    line = 1 + next(i for i, text in enumerate(path.read_text().splitlines()) if text.strip().startswith(f"{key}:"))
    assert cli.main(["config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"rayneuron config: {path}:{line}: application one: ") and says in err and err.count("\n") == 1, err


def test_a_good_file_passes_and_nothing_heavy_is_imported(model: Path, tmp_path: Path) -> None:
    """Nor for one that is refused in the last of all checks."""
    for args, code in (({}, 0), ({"serving": {"api_keys": ["env:NO_SUCH_KEY"]}}, 2)):
        script = (
            "import sys; from rayneuron import cli; code = cli.main(sys.argv[1:]);"
            f"print([name for name in {HEAVY!r} if name in sys.modules], code, file=sys.stderr)"
        )
        words = [sys.executable, "-c", script, "config", str(written(tmp_path, model, args))]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert ran.stderr.splitlines()[-1] == f"[] {code}", ran.stderr


def test_a_directory_without_a_tokenizer_for_token_ids_alone(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert preflight.inspect(parse({"model": {"path": str(model), "skip_tokenizer_init": True}})) == []


def test_what_this_machine_cannot_judge_is_only_noted(tmp_path: Path) -> None:
    """A file for Neuron nodes is checked on a laptop: neither the SDK nor the model is there, all else is held to what it says."""
    raw = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    }  # fmt: skip
    args = {"model": {"path": "/no/such", "config": raw}, "device": "neuron", "instance": "inf2.48xlarge", "tensor_parallel": 8}
    assert len(preflight.inspect(parse(args), able=False)) == 2
    with pytest.raises(RayNeuronError, match="/no/such"):
        preflight.inspect(parse(args), able=True)
    with pytest.raises(RayNeuronError, match="GiB a core"):
        preflight.inspect(parse({**args, "max_num_seqs": 4000}), able=False)
    with pytest.raises(RayNeuronError, match="tensor_parallel 7 is not possible"):
        preflight.inspect(parse({**args, "tensor_parallel": 7}), able=False)


def test_cores_that_somebody_made_visible_by_hand(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-x")
    with pytest.raises(RayNeuronError, match="NEURON_RT_VISIBLE_CORES"):
        preflight.inspect(parse({"model": {"path": str(model)}, "instance": "cores:8"}))
    assert preflight.inspect(parse({"model": {"path": str(model)}})) == []


def test_a_demo_model_is_not_made_to_check_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache"))
    assert preflight.inspect(parse({"model": {"path": "demo:random:tiny"}})) == [] and not (tmp_path / "cache").exists()
    for name in ("demo:smollm3", "demo:random:7b", "demo:"):
        with pytest.raises(RayNeuronError, match="write"):
            preflight.inspect(parse({"model": {"path": name}}))
