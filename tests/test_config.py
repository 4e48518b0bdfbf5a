"""Deployment-file fuzz: every key with a wrong type, a wrong name, a wrong value is one line with file, line, key and the nearest word."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rayneuron import aliases, cli, deployment_file
from rayneuron.aliases import DTYPE_ALIASES
from rayneuron.config import Deployment, Dtype, HotSettings, parse
from rayneuron.errors import ConfigError
from rayneuron.models import words
from rayneuron.validation import keys

GOOD: dict[str, Any] = {"model": {"path": "demo:random:tiny"}, "dtype": "fp32", "max_model_len": 64}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 0.5, 1e300, 10**30, -(10**30), float("nan"), float("inf"), "", " ", "x", "1", "true", "\0"),
    *("\ud800", "é", "a\nb", "{{", "/no/such/place", "env:", "file:/no/such/file", "sha256:00", "x" * 5000),
    *([], [1], [None], ["x"], [-1], [True], [[1]], {}, {"a": 1}, {"temperature": 9}, {1: 2}),
)
KEYS = [key for key in keys(Deployment) if key != "model.config" and not key.startswith("serving.seat.")]  # whose keys go together
MOST_LETTERS = 1200
SCHEDULE = "num_speculative_tokens_per_batch_size"


def nested(dotted: str, value: object) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = base.keys() & more.keys()
    return {**base, **more, **{k: merged(base[k], more[k]) for k in both if isinstance(base[k], dict) and isinstance(more[k], dict)}}


def misspelled(name: str, dice: random.Random) -> str:
    """The last part of a key with one letter left out, doubled or swapped."""
    head, dot, word = name.rpartition(".")
    at = dice.randrange(len(word) - 1)
    changed = dice.choice(
        [word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + word[at + 1] + word[at] + word[at + 2 :]]
    )
    return head + dot + (changed if changed != word else word + "s")


def said(path: Path) -> tuple[int, str, str]:
    """Exit code, standard output and error of `rayneuron config`; whatever it raises goes on."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["config", str(path)])
    return code, out.getvalue(), err.getvalue()


def written(folder: Path, args: Any, **more: Any) -> Path:
    path = folder / "file.yaml"
    entry = {"name": "one", "route_prefix": "/", "import_path": deployment_file.IMPORT_PATH, "args": args, **more}
    path.write_text(yaml.safe_dump({"applications": [entry]}, sort_keys=False))
    return path


def check(path: Path, what: str) -> str:
    """What refuses the file, one line that names the file and a line of it; nothing where it is taken."""
    code, out, err = said(path)
    if code == 0:
        assert out and yaml.safe_load(out)["applications"], what
        return ""
    assert code == 2 and not out and err.count("\n") == 1 and "Traceback" not in err, f"{what}: {err}"
    assert re.match(rf"rayneuron config: {re.escape(str(path))}(:\d+)?: ", err) and len(err) < MOST_LETTERS, f"{what}: {err}"
    return err


def cases(dice: random.Random, share: float) -> Iterator[tuple[str, str, object]]:
    for key in KEYS:
        for value in VALUES:
            if dice.random() < share:
                yield key, f"{key}={value!r:.40}", value


def fuzz(tmp_path: Path, share: float) -> None:
    dice = random.Random(10)
    refused = 0
    for key, what, value in cases(dice, share):
        if value == "\ud800":
            with pytest.raises(ConfigError):  # YAML cannot be written with it, JSON through a handle can
                parse(merged(GOOD, nested(key, value)))
            continue
        path = written(tmp_path, merged(GOOD, nested(key, value)))
        if err := check(path, what):
            refused += 1
            last = key.rpartition(".")[2]
            line = int((re.search(r":(\d+): ", err) or ["", "0"])[1])
            text = path.read_text().splitlines()
            assert line and (last in err or last in text[line - 1]), f"{what}: {err}"
    assert refused > 200 * share


def test_every_key_with_wrong_values(tmp_path: Path) -> None:
    fuzz(tmp_path, 0.03)


@pytest.mark.slow
def test_every_key_with_every_wrong_value(tmp_path: Path) -> None:
    fuzz(tmp_path, 1.0)


def test_every_key_misspelled_is_named_with_the_right_one() -> None:
    dice = random.Random(3)
    for key in KEYS:
        wrong = misspelled(key, dice)
        with pytest.raises(ConfigError) as caught:
            parse(merged(GOOD, nested(wrong, 1)))
        word = key.rpartition(".")[2]
        assert f"unknown key {wrong}; did you mean {word}?" in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_num_seqs": True}, "max_num_seqs: must be a whole number, got true"),
        ({"max_num_seqs": "4"}, "max_num_seqs: must be a whole number, got '4'"),
        ({"limits": {"retry_after_s": True}}, "limits.retry_after_s: must be a number, got true"),
        ({"serving": {"num_replicas": 0}}, "serving.num_replicas: must be at least 1, got 0"),
        ({"serving": {"num_replicas": 2, "autoscaling": {"max_replicas": 3}}}, "num_replicas does not go with serving.autoscaling"),
        ({"serving": {"autoscaling": {"min_replica": 1}}}, "unknown key serving.autoscaling.min_replica; did you mean min_replicas?"),
        ({"serving": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}}, "must not descend"),
        ({"num_replicas": 2}, "unknown key num_replicas; did you mean serving.num_replicas?"),
        ({"dtype": "fp23"}, "dtype: must be one of auto, fp32, bf16, fp16, got 'fp23'; did you mean fp32?"),
        ({"serving": {"api_key": "geheim"}}, "write serving.api_keys: [env:NAME]"),
        ({"serving": {"api_keys": ["geheim"]}}, "never the key"),
        ({"serving": {"api_keys": []}}, "serving.api_keys: must be a list with at least 1 entry"),
        ({"trust_remote_code": True}, "trust_remote_code is refused"),
        ({"model": {"path": "x", "trust_remote_code": False}}, "model.trust_remote_code is refused"),
        ({"model": {"path": "x", "aliases": [" "]}}, "must not be empty or blank"),
        ({"model": {"path": "x", "skip_tokenizer_init": True, "chat_template": "{{ 1 }}"}}, "goes without tokenizer and chat_template"),
        ({"device": None}, "device: must be text, got nothing"),
        ({"block_size": 100}, "write 128, the nearest power of two, or max_model_len, got 100"),
        ({"block_size": 5}, "write 16, the nearest power of two"),
        ({"block_size": 96, "max_model_len": 97}, "write 128, the nearest power of two"),
        ({"enable_prefix_caching": True, "capacity_factor": 1.5}, "goes without capacity_factor, by which KV depends on"),
        ({"enable_prefix_caching": True, "block_size": 512, "max_model_len": 300}, "needs blocks smaller than a sequence"),
        ({"seed": 10**400}, "seed: is beyond any size"),
    ],
)
def test_what_is_said(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(merged({"model": {"path": "x"}}, args))
    assert says in caught.value.message and "geheim" not in caught.value.message


@pytest.mark.parametrize(
    ("args", "block", "caches"),
    [
        ({}, 64, True),
        ({"enable_prefix_caching": False}, 64, False),
        ({"capacity_factor": 2.0}, 64, False),  # a default steps back
        ({"block_size": 256}, 256, True),
        ({"block_size": 4096}, 1000, False),  # a row is one block
        ({"device": "neuron"}, 1000, False),
        ({"device": "neuron", "block_size": 32}, 32, False),
        ({"device": "neuron", "enable_prefix_caching": True}, 32, True),
        ({"device": "neuron", "enable_prefix_caching": True, "block_size": 128}, 128, True),
    ],
)
def test_where_prefixes_are_cached_by_default(args: dict[str, Any], block: int, caches: bool) -> None:
    config = parse({"model": {"path": "x"}, **args})
    assert (config.kv_block(1000), config.caches_prefixes(1000)) == (block, caches)


def test_hot_settings_are_held_to_the_same() -> None:
    assert set(HotSettings.model_fields) == {"sampling_defaults", "limits"}


def test_a_name_is_one_of_those_it_serves() -> None:
    made = parse({"model": {"path": "/models/Big", "aliases": ["gpt-4", "Big"]}}).model
    assert made.served_names == ("Big", "gpt-4")


BROKEN = {
    "duplicate": ("applications: []\nhttp_options: {port: 1}\nhttp_options: {port: 2}\n", ":3: http_options stands here and in line 2"),
    "bomb": ("a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 9)), "holds more"),
    "list as key": ("? [1, 2]\n: 3\napplications: []\n", "a key must be a word"),
    "tab": ("applications:\n\t- a\n", ":2: cannot be read as YAML"),
    "itself": ("applications: &a [*a]\n", "cannot be read as YAML"),
    "bytes": ("\x00applications: []\n", "cannot be read as YAML"),
    "digits": (f"applications: {'9' * 5000}\n", "cannot be read as YAML"),
    "empty": ("", "is not a Ray Serve config"),
    "tag": ("applications: !!python/object/apply:os.system [ls]\n", ":1: cannot be read as YAML"),
    "deep": ("applications: " + "[" * 3000 + "]" * 3000, "cannot be read as YAML"),
    "date": ("applications: 2024-13-45\n", "cannot be read as YAML"),
    "twice": ("applications:\n- {name: a, import_path: 'a:b'}\n- {name: a, import_path: 'a:b', route_prefix: /b}\n", "have the name 'a'"),
    "no import path": ("applications:\n- name: a\n", ":2: applications.0.import_path is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_are_no_deployment_files(name: str, tmp_path: Path) -> None:
    text, says = BROKEN[name]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    code, out, err = said(path)
    assert code == 2 and not out and err.count("\n") == 1 and says in err and str(path) in err and len(err) < MOST_LETTERS, err


def overridden(name: str = "EngineServer", **more: Any) -> dict[str, Any]:
    return {"deployments": [{"name": name, **more}]}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (overridden("EngineServe"), ":9: application one: has no deployment 'EngineServe'; write name: EngineServer"),
        (overridden(user_config={"limit": {}}), ":11: application one: unknown key limit; did you mean limits?"),
        (overridden(user_config={"limits": {"max_waiting": -1}}), ":12: application one: limits.max_waiting"),
        (overridden(user_config=[]), "user_config: must be a mapping of keys, got a list"),
        ({"runtime_env": {"env_vars": {"NEURON_RT_VISIBLE_CORES": "0-3"}}}, "the core ledger chooses cores"),
        ({"route_prefix": "chat"}, "must begin with a slash"),
        ({"ruote_prefix": "/"}, "did you mean route_prefix?"),
    ],
)
def test_what_ray_reads_is_checked_too(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"model": {"path": "demo:random:tiny"}}, **more)
    assert check(path, says) and says in said(path)[2], said(path)[2]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.path.x=3", "--set model.path.x: path is a plain value and holds no x; set path itself"),
        ("max_num_seqs=true", "--set max_num_seqs: application one: max_num_seqs: must be a whole number, got true"),
        ("max_num_seq=3", "--set max_num_seq: application one: unknown key max_num_seq; did you mean max_num_seqs?"),
        ("max_model_len=100000", "--set max_model_len: application one: max_model_len 100000 is beyond the model's"),
        ("model..path=3", "is not KEY=VALUE"),
        ("model.=3", "is not KEY=VALUE"),
        ("dtype=[", "is not valid YAML"),
    ],
)
def test_options_are_named_as_options(word: str, says: str, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, {"model": {"path": str(tiny)}})
    assert cli.main(["config", str(path), "--set", word]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1, err


def test_what_config_prints_can_be_served_and_says_the_same(tmp_path: Path) -> None:
    more = {"serving": {"autoscaling": {"max_replicas": 2}}, "limits": {"max_waiting": 3}}
    first = said(
        written(tmp_path, merged(GOOD, more), deployments=[{"name": "EngineServer", "user_config": {"limits": {"max_waiting": 4}}}])
    )
    again = tmp_path / "again.yaml"
    again.write_text(first[1])
    assert first[0] == 0 and said(again)[1] == first[1], said(again)
    entry = yaml.safe_load(first[1])["applications"][0]
    assert parse(entry["args"]).limits.max_waiting == 3 and entry["deployments"][0]["name"] == "EngineServer"


def test_the_words_for_dtypes_are_those_of_the_models() -> None:
    assert get_args(Dtype) == ("auto", *words.COMPUTE) and set(DTYPE_ALIASES.values()) == set(words.COMPUTE) == set(words.WIDTHS)
    assert all(DTYPE_ALIASES[theirs] == ours for ours, theirs in words.COMPUTE.items())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"speculative_config": {"method": "eagle3"}}, "method eagle3 needs model: a directory with such heads, and no quantization"),
        ({"speculative_config": {"method": "eagle", "model": "/h", "quantization": "int8"}}, "eagle needs model: a directory"),
        ({"speculative_config": {"method": "bigram"}}, "method bigram is none of ngram, draft_model, eagle, eagle3, medusa; write ngram"),
        ({"speculative_config": {"method": ""}}, "method that is empty is none of"),
        ({"speculative_config": {"method": "suffix"}}, "medusa; write ngram"),
        ({"speculative_config": {"method": "Eagle-3"}}, "medusa; write eagle3"),
        ({"speculative_config": {"method": "qwen3_next_mtp"}}, "medusa; write draft_model with quantization: int8, a copy of the model"),
        ({"speculative_config": {"prompt_lookup_max": 10**9}}, "speculative_config.prompt_lookup_max: must be at most 64, got 1000000000"),
        (
            {"speculative_config": {"method": "medusa", "model": "/h"}, "tensor_parallel": 2, "sequence_parallel": True},
            "goes without sequence_parallel",
        ),
        ({"speculative_config": {"method": "eagle", "model": "/h"}, "pipeline_parallel": 2}, "goes without pipeline_parallel"),
        ({"speculative_config": {"method": "eagle", "model": "/h"}, "compile": {"async_mode": True}}, "goes without compile.async_mode"),
        (
            {"speculative_config": {"method": "medusa", "model": "/h"}, "pools": {"prefill": {}}},
            "goes without pools, which do not hand over what medusa heads need of a prompt; write method: ngram",
        ),
        (
            {"speculative_config": {"method": "eagle", "model": "/h"}, "tensor_parallel": 2, "shard_over_sequence": True},
            "goes without shard_over_sequence, which what reads hidden states is not cut by; write method: ngram",
        ),
        ({"speculative_config": {"method": "draft_model"}}, "a copy of the model saves nothing; write quantization: int8"),
        ({"speculative_config": {"method": "ngram", "model": "/m"}}, "are of a draft model; write method: draft_model"),
        ({"speculative_config": {"model": "/m", "draft_tensor_parallel_size": 2}}, "draft_tensor_parallel_size 2 beside tensor_parallel 1"),
        ({"speculative_config": {"model": "/m"}, "tensor_parallel": 2, "shard_over_sequence": True}, "goes without shard_over_sequence"),
        ({"speculative_config": {SCHEDULE: [[1, 4, 9]]}}, "tries 9, more than num_speculative_tokens 8; write 9"),
        ({"speculative_config": {SCHEDULE: [[4, 1, 2]]}}, "write [first, last, most] for each range"),
        ({"speculative_config": {SCHEDULE: [[1, 4, 2], [4, 8, 1]]}}, "none twice, most from 0 to 64, got [4, 8, 1]"),
        ({"speculative_config": {SCHEDULE: [[1, 4]]}}, "write [first, last, most]"),
        ({"speculative_config": {"disable_by_batch_size": 8}}, "write num_speculative_tokens_per_batch_size: [[9, 256, 0]]"),
        ({"speculative_config": {"prompt_lookup_min": 5, "prompt_lookup_max": 4}}, "prompt_lookup_min 5 is above prompt_lookup_max 4"),
        ({"speculative_config": {}, "compile": {"async_mode": True}}, "goes without compile.async_mode"),
        ({"speculative_config": {}, "pipeline_parallel": 2}, "goes without pipeline_parallel"),
        ({"speculative_config": {}, "capacity_factor": 1.5}, "goes without capacity_factor"),
        ({"num_speculative_tokens": 4}, "write speculative_config: {method: ngram, num_speculative_tokens: 8}"),
    ],
)
def test_what_speculation_does_not_go_with_says_what_to_write(more, says):
    with pytest.raises(ConfigError) as wrong:
        parse({"model": {"path": "demo:random"}, **more})
    assert says in str(wrong.value)


def said_of_drafts(**words):
    made = parse({"model": {"path": "demo:random"}, "speculative_config": words}).speculative_config
    return made.method, made.model, made.prompt_lookup_min, made.prompt_lookup_max


def test_drafts_in_the_words_of_vllm_mean_what_they_mean_there():
    """A lookup by either name, null as nothing said, and one end of what is looked up where only that is said."""
    for spelled in ({"model": "ngram"}, {"model": "[ngram]"}, {"method": "[ngram]"}, {"method": "ngram", "model": "ngram"}, {}):
        assert said_of_drafts(**spelled, num_speculative_tokens=3) == ("ngram", None, 2, 4)
    assert said_of_drafts(method=None, model="/m") == ("draft_model", "/m", 2, 4)
    assert said_of_drafts(prompt_lookup_max=1) == ("ngram", None, 1, 1)
    assert said_of_drafts(prompt_lookup_min=7, prompt_lookup_max=None) == ("ngram", None, 7, 7)
    assert parse({"model": {"path": "demo:random"}, "speculative_config": {"enabled": True}}).speculative_config.method == "ngram"


@pytest.mark.parametrize("name", aliases.DRAFTS)
def test_what_vllm_says_of_drafts_and_has_no_meaning_here_is_refused_with_the_reason(name, tmp_path):
    """Wherever it is said; what only says how it is here anyway is passed over."""
    said = {"model": "demo:random", "speculative_config": {"method": "ngram", name: "other"}}
    file = tmp_path / "deployment.yaml"
    file.write_text(json.dumps({"applications": [{"name": "a", "import_path": deployment_file.IMPORT_PATH, "args": said}]}, indent=1))
    for ask in (lambda: parse(said), lambda: deployment_file.read(file)):
        with pytest.raises(ConfigError) as wrong:
            ask()
        assert f"speculative_config.{name} is refused: {aliases.DRAFTS[name]}" in str(wrong.value)
        assert wrong.value.param == f"speculative_config.{name}" and "\n" not in str(wrong.value)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if f'"{name}"' in text)
    assert f"deployment.yaml:{line}: " in str(wrong.value)
    for given in (None, False, *aliases.DRAFTS_GIVEN.get(name, ())):
        assert said_of_drafts(method="ngram", **{name: given}) == ("ngram", None, 2, 4)


def test_where_nothing_is_said_of_speculation_nothing_is_refused_for_it():
    """And what was not said is not said to a group's workers either."""
    made = parse({"model": {"path": "demo:random"}, "compile": {"async_mode": True}})
    assert not made.speculative_config and "speculative_config" not in parse(made.model_dump(exclude_unset=True)).model_fields_set
    for off in (False, None, {"enabled": False}):
        made = parse({"model": {"path": "demo:random"}, "speculative_config": off})
        assert not made.speculative_config and "speculative_config" in parse(made.model_dump(exclude_unset=True)).model_fields_set
