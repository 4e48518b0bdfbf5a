"""Models by hub id from a hub on loopback: whole or not at all, resumed, checked, one commit on every node, one line for what is wrong."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayneuron import LLM, cli, deployment_file, loading, preflight, settings, sources
from rayneuron.errors import CheckpointError, ConfigError, NotReady, RayNeuronError
from tests.sources import hub_server

constants = pytest.importorskip("huggingface_hub.constants")
NAME = "org/tiny"
WEIGHTS = "model.safetensors"
OTHERS = {"README.md": b"# tiny", "pytorch_model.bin": b"1", "consolidated.safetensors": b"2", "original/model.safetensors": b"3"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> Iterator[hub_server.Hub]:
    """The hub, with the tiny model in it, and empty caches."""
    with hub_server.running() as running:
        running.add(NAME, {**hub_server.folder(tiny), **OTHERS})
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        node(monkeypatch, tmp_path / "node")
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # of which it keeps whole ones
        quick = types.SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr("huggingface_hub.file_download.time", quick)  # it waits a second before it resumes
        yield running


def node(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Be a node whose caches are there; kernels need not be built again."""
    built = settings.cache_dir() / "native"
    (folder / "ours").mkdir(parents=True)
    (folder / "ours" / "native").symlink_to(built.resolve())
    monkeypatch.setenv("RAYNEURON_CACHE", str(folder / "ours"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refused(source: str, kind: type[RayNeuronError], *says: str) -> None:
    with pytest.raises(kind) as caught:
        sources.resolve(source)
    for word in says:
        assert word in caught.value.message
    assert "\n" not in caught.value.message and sources.located(source) is None


def left(folder: Path) -> list[str]:
    """Unfinished files of a cache."""
    return [path.name for path in folder.rglob("*") if "incomplete" in path.name or path.is_symlink() and not path.exists()]


def test_what_is_read_is_fetched_once_and_nothing_else(hub: hub_server.Hub, tiny: Path) -> None:
    assert sources.located(NAME) is None
    hub.token = "geheim"
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "geheim")
        found = sources.resolve(NAME, lambda done, total: seen.append((done, total)))
        assert hub_server.folder(found.path) == hub_server.folder(tiny)
        assert found.source == f"{NAME}@{hub.branches[NAME]['main']}" and seen
        before = len(hub.fetched())
        assert sources.resolve(NAME) == found and sources.resolve(found.source) == found
    assert len(hub.fetched()) == before and sources.located(NAME) == sources.located(found.source) == found.path


def test_config_and_tokenizer_alone_do_not_pass_for_the_model(hub: hub_server.Hub, tiny: Path) -> None:
    words = sources.resolve(NAME, weights=False).path
    assert (words / "tokenizer.json").is_file() and not (words / WEIGHTS).exists() and sources.located(NAME) is None
    assert (sources.resolve(NAME).path / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()


def test_a_broken_connection_goes_on_where_it_broke(hub: hub_server.Hub, tiny: Path) -> None:
    hub.faults[WEIGHTS] = [1000, 5000]
    assert (sources.resolve(NAME).path / WEIGHTS).read_bytes() == (tiny / WEIGHTS).read_bytes()
    assert [span for method, path, span in hub.asked if method == "GET" and "/cdn/" in path] == ["", "bytes=1000-", "bytes=6000-"]


def test_what_never_arrives_is_no_model_and_whole_files_are_kept(hub: hub_server.Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = [0] * 50
    refused(NAME, NotReady, "could not be fetched")
    assert left(tmp_path) == []
    hub.faults.clear()
    hub.asked.clear()
    sources.resolve(NAME)
    assert hub.fetched() == [WEIGHTS]


def test_what_arrives_damaged_is_fetched_again(hub: hub_server.Hub, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.faults |= {WEIGHTS: ["damaged"], "tokenizer.json": ["damaged"]}
    with caplog.at_level(logging.WARNING, "rayneuron"):
        assert hub_server.folder(sources.resolve(NAME).path) == hub_server.folder(tiny)
    assert f"{WEIGHTS}, tokenizer.json is not what the hub says it is; fetching it again" in caplog.text


def test_what_always_arrives_damaged_is_refused_and_not_kept(hub: hub_server.Hub, tmp_path: Path) -> None:
    hub.faults[WEIGHTS] = ["damaged"] * 9
    refused(NAME, CheckpointError, WEIGHTS, "arrived damaged 2 times")
    assert not list(tmp_path.rglob(WEIGHTS)) and left(tmp_path) == []


def test_a_file_that_a_killed_process_left_unchecked_is_checked(hub: hub_server.Hub, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults[WEIGHTS] = ["damaged"]
    monkeypatch.setattr("rayneuron.sources.hub._damaged", lambda path: sys.exit(9))
    with pytest.raises(SystemExit):
        sources.resolve(NAME)
    monkeypatch.undo()
    assert sources.located(NAME) is None


@pytest.mark.parametrize(
    ("change", "source", "says"),
    [
        ({"token": "x"}, NAME, ["neither a directory here nor a model", "HF_TOKEN"]),
        ({"token": "x", "gated": True}, NAME, [f"{NAME} is gated: accept its terms at http://", "HF_TOKEN"]),
        ({}, "org/none", ["org/none is neither a directory here nor a model of http://"]),
        ({}, f"{NAME}@v9", [f"{NAME} has no revision 'v9'; write a branch, tag or commit"]),
        ({}, f"{NAME}@{'0' * 40}", ["has no revision"]),
        ({"sizes": {WEIGHTS: 10**16}}, NAME, ["needs 10000000.00 GB more", "set HF_HOME"]),
    ],
)
def test_what_is_wrong_is_one_line(hub: hub_server.Hub, change: dict, source: str, says: list[str], tmp_path: Path) -> None:
    for name, value in change.items():
        setattr(hub, name, value)
    with pytest.raises(ConfigError) as asked:  # before anything is fetched, or Ray is started
        sources.ask(source)
    assert all(word in asked.value.message for word in says) and hub.fetched() == []
    refused(source, ConfigError, *says)
    assert not list(tmp_path.rglob(WEIGHTS)) and left(tmp_path) == []


def test_a_model_that_can_be_had_is_only_asked_for(hub: hub_server.Hub, tmp_path: Path) -> None:
    sources.ask(NAME)
    assert hub.fetched() == [] and left(tmp_path) == []
    sources.resolve(NAME)
    before = len(hub.asked)
    sources.ask(NAME)
    assert len(hub.asked) == before, "what is here whole is asked of nobody"


def test_every_node_has_the_commit_of_the_first(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = sources.resolve(NAME)
    files = {**hub.models[NAME][hub.branches[NAME]["main"]], "new.txt": b"1"}
    moved = hub.add(NAME, files)
    node(monkeypatch, tmp_path / "other")
    other = sources.resolve(first.source)
    assert other.source == first.source and other.path != first.path and not (other.path / "new.txt").exists()
    assert sources.resolve(NAME).source == f"{NAME}@{moved}"
    hub.add(NAME, files | {"new.txt": b"2"}, branch="refs/pr/1")
    assert (sources.resolve(f"{NAME}@refs/pr/1").path / "new.txt").read_bytes() == b"2"


def test_offline_means_what_is_here(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        offline(patch)
        refused(NAME, ConfigError, "is not whole in the cache, and HF_HUB_OFFLINE forbids to fetch it")
    found = sources.resolve(NAME)
    offline(monkeypatch)
    asked = len(hub.asked)
    assert sources.resolve(NAME) == sources.resolve(found.source) == found
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "fresh"))  # fetched by somebody else's huggingface_hub
    assert sources.resolve(found.source) == found and len(hub.asked) == asked


KEYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "model.path": lambda named: {"model": {"path": named}},
    "model.tokenizer": lambda named: {"model": {"tokenizer": named}},
    "speculative_config.model": lambda named: {"speculative_config": {"model": named, "num_speculative_tokens": 2}},
}


@pytest.mark.parametrize("key", KEYS)
def test_what_a_hub_does_not_give_is_said_by_the_key_that_names_it(
    hub: hub_server.Hub, key: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Ray is started, and by a start itself; whether it is not there, not for us, or does not answer."""
    said = KEYS[key]("org/none@v1")
    args = {**said, "model": {"path": str(tiny), **said.get("model", {})}}
    entry = {"name": "one", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump({"applications": [entry]}, sort_keys=False))
    file = deployment_file.read(tmp_path / "file.yaml")
    notes = preflight.inspect_file(file)
    assert notes == [f"one: {'' if key == 'model.path' else key + ' '}org/none@v1 is not here yet, so it was not looked at"]
    absent, silent = (False, ConfigError, "neither a directory here nor a model"), (True, NotReady, "could not be fetched from http")
    for hub.ill, kind, why in (absent, silent):
        with pytest.raises(kind, match=rf"file.yaml:\d+: application one: {key}: .*{why}"):
            preflight.ask_hubs(file)
        with pytest.raises(kind, match=f"^{key}: .*{why}") as caught:
            loading.open_engine(file.deployments["one"])
        assert caught.value.param == key


def test_a_hub_that_is_down_leaves_what_is_here(hub: hub_server.Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.ill = True
    refused(NAME, NotReady, "could not be fetched")
    hub.ill = False
    found = sources.resolve(NAME)
    hub.ill = True
    assert sources.resolve(NAME) == found and "does not answer" in caplog.text


def test_several_processes_of_a_node_fetch_once(hub: hub_server.Hub) -> None:
    found: list[sources.Found] = []
    threads = [threading.Thread(target=lambda: found.append(sources.resolve(NAME))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 4 and hub.fetched().count(WEIGHTS) == 1


def test_a_directory_goes_first_and_an_absent_path_is_no_id(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert sources.resolve(NAME).path == Path(NAME) and not hub.asked
    for path in ("/no/such", "./org/none", "org/none/deeper", "tiny", "~/org", "https://a/b", "org/none@", "org/na me", "\0", "gs://a/b"):
        refused_path(path)
    assert not hub.asked


def refused_path(path: str) -> None:
    for ask in (sources.resolve, sources.located):
        with pytest.raises(ConfigError, match="is not a directory; name a model directory, org/name of a hub"):
            ask(path)


def test_config_fetches_nothing_and_says_so(hub: hub_server.Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", NAME]) == 0 and not hub.asked
    assert "note: tiny: org/tiny is not here yet, so it was not looked at" in capsys.readouterr().err
    sources.resolve(NAME)
    assert cli.main(["config", NAME, "--max-model-len", "1000000"]) == 2, "what is here is looked at"
    assert "--max-model-len: application tiny: max_model_len 1000000 is beyond the model's" in capsys.readouterr().err


def test_a_group_reads_the_commit_its_first_rank_found(hub: hub_server.Hub, tiny: Path) -> None:
    options = {"tensor_parallel_size": 2, "dtype": "fp32", "max_model_len": 64, "max_num_seqs": 1, "threads": 1}
    prompt = {"prompt_token_ids": list(range(20, 40))}
    with LLM(model=NAME, **options) as llm:
        said = llm.generate(prompt, {"temperature": 0, "max_tokens": 4})[0].outputs[0].token_ids
    with LLM(tiny, **{**options, "tensor_parallel_size": 1}) as llm:
        assert said == llm.generate(prompt, {"temperature": 0, "max_tokens": 4})[0].outputs[0].token_ids
    assert [path for _, path, _ in hub.asked if "/revision/" in path] == [f"/api/models/{NAME}/revision/main"]
    assert hub.fetched().count(WEIGHTS) == 1


def test_the_environment_alone_is_enough(hub: hub_server.Hub, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.token = "geheim"
    words = ["generate", "--prompt", "hello", "--max-tokens", "5", "--dtype", "fp32", "--max-model-len", "64"]
    there = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "geheim", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "rayneuron", *words, NAME]
    done = subprocess.run(command, env={**os.environ, **there}, capture_output=True, text=True, timeout=300)
    assert cli.main([*words, str(tiny)]) == 0
    assert done.returncode == 0 and done.stdout == capsys.readouterr().out and done.stdout.strip(), done.stderr
    assert f"fetching {NAME} at " in done.stderr and "HTTP Request" not in done.stderr
    assert cli.main([*words, NAME]) == 2, "without the token"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "HF_TOKEN" in said
