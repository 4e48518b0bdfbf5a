"""Flags, files and LLM say the same: every key of a deployment, under its own name and vLLM's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from rayneuron import LLM, aliases, cli, deployment_file, llm
from rayneuron.cli import deployment, flags
from rayneuron.config import Deployment, parse
from rayneuron.errors import ConfigError
from rayneuron.serve_config import HttpOptions
from rayneuron.validation import fields, override

MODEL = "org/name"
KEYS = {key: field for key, field in fields(Deployment) if key not in ("model", "model.path", "lmi")}
KEYS = {key: field for key, field in KEYS.items() if not key.startswith("serving.seat.")}  # which only go together
CANDIDATES: dict[Any, list[Any]] = {
    bool: [True, False],
    int: [0, 1, 2, 3, 16, 2048],
    float: [0.5, 2, 30.0, 1e-3],
    str: ["neuron", "x", "12", "true", "a b: c"],
    Any: [{"temperature": 0.5}, {"max_replicas": 2}, {"step_s": 3}, {"batch": [2, 4]}, {"trace": True}, {"cache": "/x"}, {"max_waiting": 3},
          {"deterministic": True}, {"policy_function": "a:b"}, {"x": [1, "y", None]}, {"a": 1}, 7, "auto"],
}  # fmt: skip


class Taken(Exception):
    """Instead of an engine: the deployment that one would have been opened for."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return cli._parser()


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(config: Deployment, progress: object) -> None:
        raise Taken(config)

    monkeypatch.setattr(llm, "open_engine", taken)


def by_flag(parser: argparse.ArgumentParser, *words: str, what: str = MODEL, command: str = "serve") -> Deployment:
    (made,) = deployment.read(parser.parse_args([command, what, *words])).deployments.values()
    return made


def by_file(folder: Path, args: dict[str, Any]) -> Deployment:
    path = folder / "file.yaml"
    entry = {"name": "one", "route_prefix": "/", "import_path": deployment_file.IMPORT_PATH, "args": args}
    path.write_text(yaml.safe_dump({"applications": [entry]}))
    return deployment_file.read(path).deployments["one"]


def by_llm(**options: Any) -> Deployment:
    with pytest.raises(Taken) as taken:
        LLM(MODEL, **options)
    return taken.value.args[0]


def words(flag: str, value: Any) -> list[str]:
    """As a person writes it."""
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        return [flag, json.dumps(value)]
    return [flag, str(value)]


EXAMPLES: dict[str, list[Any]] = {  # of keys whose values are told by no type
    "pools": [{"prefill": {"max_num_seqs": 2}}],
    "pools.prefill": [{"max_num_seqs": 2}],
    "speculative_config": [{"method": "ngram"}],
    "speculative_config.method": ["ngram"],
    "lora": [{"max_loras": 2}],
    "lora.lora_modules": [["a=/x", "b=/y"], {"a": "/x", "b": "/y"}],
    "serving.seat": [{"node": "127.0.0.2", "cores": [0, 1], "owner": "gateway"}],
}


def accepted(key: str, field: Any) -> Iterator[Any]:
    """Values of a key that a deployment may have."""
    kind, nullable = flags._kind(field.annotation)
    listed = [[1], [2, 4]] if kind == list[int] else [["env:A", "file:/b"], ["https://a.example", "*"]]
    kinds = {Literal: list(get_args(kind)), list: listed}
    chosen = EXAMPLES.get(key) or kinds.get(get_origin(kind), CANDIDATES.get(kind, CANDIDATES[Any]))
    for value in [*chosen, *([None] if nullable else [])]:
        try:
            parse(override({"model": {"path": MODEL}}, {key: value}))
        except ConfigError:
            continue
        yield value


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_the_same_as_a_flag_in_a_file_and_in_llm(key: str, parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    values = list(accepted(key, KEYS[key]))
    seen = [parse({"model": MODEL})]
    for value in values:
        args = override({"model": {"path": MODEL}}, {key: value})
        expected = parse(args)
        seen.append(expected)
        assert by_file(tmp_path, args) == expected
        assert by_llm(**override({}, {key: value})) == expected
        for flag in {f"--{key}", flags._flag(key), f"--{key.replace('.', '-')}"}:
            assert by_flag(parser, *words(flag, value)) == expected, (flag, value)
        if isinstance(value, bool):
            assert by_flag(parser, flags._flag(key) if value else f"--no-{flags._flag(key)[2:]}") == expected
    assert any(made != seen[0] for made in seen), "no value was tried that counts"


OURS = [name for name in aliases.NAMES if name != "model" and not str(aliases.means(name) or "http_options.").startswith("http_options.")]
ODD = {
    "served_model_name": (["a", "b"], {"model.name": "a", "model.aliases": ["b"]}),
    "kv_cache_dtype": ("fp8_e5m2", {"kv_dtype": "f8e5m2"}),
    "scheduling_policy": ("priority", {"limits.client_priority": True}),
    "default_chat_template_kwargs": ({"enable_thinking": False}, {"serving.default_chat_template_kwargs": {"enable_thinking": False}}),
    "enable_lora": (True, {"lora.enabled": True}),
    "revision": ("v1", {"model.revision": "v1"}),
}


@pytest.mark.parametrize("name", OURS)
def test_every_name_of_vllm_is_our_key_everywhere(name: str, parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    key = str(aliases.means(name))
    value, means = ODD[name] if name in ODD else ([v for v in accepted(key, KEYS[key]) if v != KEYS[key].default][0], None)
    expected = parse(override({"model": {"path": MODEL}}, means or {key: value}))
    assert expected != parse({"model": {"path": MODEL}})
    assert by_file(tmp_path, {"model": MODEL, name: value}) == by_llm(**{name: value}) == expected
    assert by_flag(parser, *words(f"--{name}", value)) == by_flag(parser, *words(flags._flag(name), value)) == expected


def test_vllms_short_flags(parser: argparse.ArgumentParser) -> None:
    for short, long in (("-tp", "--tensor-parallel-size"), ("-pp", "--pipeline-parallel-size"), ("-dp", "--data-parallel-size")):
        assert by_flag(parser, short, "2") == by_flag(parser, f"{short}=2") == by_flag(parser, long, "2") != by_flag(parser)


def test_an_application_is_one_of_a_file(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ConfigError, match="--application is for a file"):
        by_flag(parser, "--application", "chat")


@pytest.mark.parametrize("name", aliases.REFUSED)
def test_what_has_no_meaning_here_is_refused_with_the_reason(
    name: str, parser: argparse.ArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = aliases.REFUSED[name]
    wrong = "other" if name in aliases.GIVEN else True
    for ask in (lambda: by_file(tmp_path, {"model": MODEL, name: wrong}), lambda: LLM(MODEL, **{name: wrong})):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert f"{name} {reason}" in caught.value.message
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["serve", MODEL, f"{flags._flag(name)}=geheim"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said == f"rayneuron serve: {flags._flag(name)} {reason}\n"
    for given in aliases.GIVEN.get(name, (False,)):
        assert by_file(tmp_path, {"model": MODEL, name: given}) == by_llm(**{name: given}) == parse({"model": MODEL})
        said = given if isinstance(given, str) else json.dumps(given)
        assert by_flag(parser, f"{flags._flag(name)}={said}") == parse({"model": MODEL})


@pytest.mark.parametrize("key", HttpOptions.model_fields)
def test_the_port_and_what_belongs_to_it(key: str, parser: argparse.ArgumentParser) -> None:
    value = {"port": 8123, "request_timeout_s": 2.5, "keep_alive_timeout_s": 9}.get(key, "/text")
    theirs = [name for name, ours in aliases.RENAMED.items() if ours == f"http_options.{key}"]
    for flag in (f"--http_options.{key}", *map(flags._flag, theirs)):
        file = deployment.read(parser.parse_args(["serve", MODEL, flag, str(value)]))
        assert file.content["http_options"][key] == value
    for name in theirs:
        with pytest.raises(ConfigError, match=f"{name} belongs to the whole file; write http_options.{key}, beside applications"):
            parse({"model": MODEL, name: value})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-model-length", "3"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--tensor_paralel_size=3"], "unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        (["--limits.max_wating", "3"], "unknown flag --limits-max-wating; did you mean --limits-max-waiting?"),
        (["again"], "'again' is one word too many; flags begin with --"),
        (["--max-model-len"], "argument --max-model-len: expected one argument"),
        (["--max-num-seqs", "many"], "--max-num-seqs: application name: max_num_seqs: must be a whole number, got 'many'"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: application name: tensor_parallel: must be at least 1, got 0"),
        (["--port", "70000"], "--port: http_options.port: must be at most 65535, got 70000"),
        (["--buckets-batch", "1", "x"], "--buckets-batch: application name: buckets.batch.1"),
        (["--model-path.x", "3"], "unknown flag --model-path-x"),
    ],
)
def test_a_wrong_flag_is_one_line(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(["config", MODEL, *more])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and says in said.err and said.err.count("\n") == 1 and not said.out, said.err


def test_flags_override_a_file_and_the_log_says_which(
    tmp_path: Path, parser: argparse.ArgumentParser, caplog: pytest.LogCaptureFixture
) -> None:
    by_file(tmp_path, {"model": MODEL, "tensor_parallel_size": 4, "max_num_seqs": 3})
    path = str(tmp_path / "file.yaml")
    with caplog.at_level("INFO", "rayneuron"):
        made = by_flag(parser, "--tensor-parallel", "2", "--port", "8011", what=path)
    assert (made.tensor_parallel, made.max_num_seqs) == (2, 3)
    assert f"{path} is overridden by --tensor-parallel (tensor_parallel), --port (http_options.port)" in caplog.text


def test_both_names_of_one_thing_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file.yaml:\d+: application one: tensor_parallel_size and tensor_parallel say the same"):
        by_file(tmp_path, {"model": MODEL, "tensor_parallel_size": 4, "tensor_parallel": 4})
    with pytest.raises(ConfigError, match=r"file.yaml:4: application one: tensor_parallel: must be at least 1, got 0"):
        by_file(tmp_path, {"model": MODEL, "tensor_parallel_size": 0})


def test_a_model_alone_is_served_at_the_root_of_this_machine(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    file = deployment.read(parser.parse_args(["serve", "demo:smollm2", "--served-model-name", "chat", "small"]))
    assert file.deployments["chat"].model.served_names == ("chat", "small")
    example = yaml.safe_load((Path(__file__).parent.parent / "deployments/smollm2.yaml").read_text())
    assert all(file.content[key] == example[key] for key in ("http_options", "controller_options"))
    assert [entry["route_prefix"] for entry in file.content["applications"]] == ["/"]
    monkeypatch.setenv("HF_MODEL_ID", "org/other@v2")
    (made,) = deployment.read(parser.parse_args(["serve"])).deployments.values()
    assert (made.model.path, made.model.served_names) == ("org/other@v2", ("other", "org/other"))
    monkeypatch.delenv("HF_MODEL_ID")
    with pytest.raises(ConfigError, match="name a model or a deployment file: rayneuron serve demo:smollm2"):
        deployment.read(parser.parse_args(["serve"]))


def test_generate_and_plan_keep_the_flags_of_their_own(parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(["generate", MODEL, "--prompt", "x", "--seed", "3", "--kv-cache-tokens", "64", "--fused_qkv=false"])
    assert args.seed == 3 and args.said == {"kv_cache_tokens": 64, "fused_qkv": False}
    args = parser.parse_args(["plan", MODEL, "--instance", "inf2.48xlarge", "--nodes", "2"])
    assert (args.instance, args.nodes) == ("inf2.48xlarge", 2) and not hasattr(args, "said")


def test_help_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: rayneuron serve MODEL|FILE.yaml [--KEY VALUE ...]\n") and max(map(len, said.splitlines())) <= 120
    for line in ("--max-model-len N ", "--limits-max-waiting N ", "--dtype auto|fp32|bf16|fp16", "--tensor-parallel-size N ", "--port N "):
        assert line in said
    assert "--enforce-eager" not in said and "==SUPPRESS==" not in said
