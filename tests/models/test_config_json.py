"""config.json of every family, a key at a time: left out, null, spelled otherwise, of other types. As transformers reads it, or refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import hub
from rayneuron.models.collectives import Solo
from rayneuron.models.config_json import dtype_of
from rayneuron.models.defaults import ANY_ROPE_THETA, FIELDS, ROPE_THETA, SECTIONS, SPELLINGS, Maybe
from tests.models import cases
from tests.models.cases import Runner, Saved

TOKENS = 24
ABSENT = object()
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base")
OTHERS = ("head_dim", "sliding_window", "layer_types", "use_sliding_window", "attention_bias", "dtype", "torch_dtype", "per_layer_config")
WRONG: tuple[Any, ...] = ("2", 1.5, True, False, -1, 0, 1, [], {}, ["x"], {"x": 1}, 10**400, float("nan"), float("inf"), "gelu", "relu", "")
# What transformers 5.24 trips over and we do not: its DBRX reads these before it has brought spellings together.
SAME = (("dbrx", "d_model"), ("dbrx", "hidden_size"))
# One a model type, and those whose keys change the layers.
QUICK = (
    "llama", "mistral", "mixtral", "qwen2_windows", "qwen3", "qwen3_moe", "gpt2", "gpt_bigcode", "opt_350m", "bloom", "gpt_neox", "gptj",
    "dbrx", "gemma3_text",
)  # fmt: skip
DEFAULTED = {  # tiny models whose keys have their class defaults, so that leaving one out is no change
    "gptj_wide": lambda: tf.GPTJConfig(vocab_size=97, n_embd=128, n_layer=2, n_head=2, n_positions=128),
    "mixtral_default": lambda: tf.MixtralConfig(**{**cases.SMALL, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "qwen3_default": lambda: tf.Qwen3Config(**cases.SMALL),
}


class Directory:
    """A model directory whose config.json is rewritten, and what transformers and we make of it."""

    def __init__(self, saved: Saved, folder: Path) -> None:
        self.path, self.ids = folder, saved.ids
        shutil.copytree(saved.path, folder)
        self.raw = hub.read_config(folder)
        self._theirs: dict[str, torch.Tensor | None] = {}

    def theirs(self) -> torch.Tensor | None:
        """transformers' logits, None where it refuses the directory or would invent weights. Kept by what its config says."""
        try:
            config = tf.AutoConfig.from_pretrained(self.path, local_files_only=True)
            said = {k: v for k, v in config.to_dict().items() if k not in ("transformers_version", "architectures")}
            key = json.dumps(said, sort_keys=True, default=repr)
        except Exception:
            return None
        if key not in self._theirs:
            self._theirs[key] = self._logits(config)
        return self._theirs[key]

    def _logits(self, config: Any) -> torch.Tensor | None:
        try:
            model, info = tf.AutoModelForCausalLM.from_pretrained(
                self.path, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
            if info["missing_keys"] or info["mismatched_keys"]:
                return None
            with torch.no_grad():
                return model.eval()(self.ids.long(), use_cache=False).logits
        except Exception:
            return None

    def write(self, config: dict[str, Any]) -> None:
        (self.path / "config.json").write_text(json.dumps(config))

    def unchanged(self, ours: torch.Tensor) -> str | None:
        """None where these are the logits of the directory as it was saved."""
        self.write(self.raw)
        theirs = self.theirs()
        return None if theirs is not None and (ours - theirs).abs().max() < 1e-4 else "the key changes the model"

    def differs(self, config: dict[str, Any], names: tuple[str, ...]) -> str | None:
        """Why this config.json is read otherwise than by transformers, or refused without a name; None where all is well."""
        self.write(config)
        try:
            raw = hub.read_config(self.path)
            arch = models.check(raw, tp=1, max_model_len=64)
            with torch.no_grad():
                ours = Runner.open(self.path, Solo(), arch=arch).chunk(self.ids, 0, TOKENS, TOKENS, 32)
        except (CheckpointError, ConfigError) as e:
            return None if any(n.split(".")[-1] in str(e) for n in (*names, "tensor", "positions")) else f"refused without a name: {e}"
        theirs = self.theirs()
        if theirs is None:
            kind, key = self.raw["model_type"], names[0]
            return "transformers refuses it" if reads(kind, key) and (kind, key) not in SAME else self.unchanged(ours)
        gap = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
        return None if gap < 1e-4 else f"off by {gap}"


def directory(name: str, folder: Path) -> Directory:
    build = {**cases.CONFIGS, **DEFAULTED}[name]
    return Directory(cases.save(build(), folder / "saved", tokens=TOKENS), folder / "model")


def reads(kind: str, key: str) -> bool:
    """Whether the maths of a model depend on a key of config.json."""
    rotated = ROPE if kind not in ("gpt2", "gpt_bigcode", "gptj", "bloom", "opt") else ()
    if "." in key:
        return key.split(".")[1] in SECTIONS[key.split(".")[0]]
    return key in (*FIELDS[kind], *SPELLINGS.get(kind, {}), *rotated, "head_dim", "dtype", "torch_dtype", "per_layer_config")


def spellings(raw: dict[str, Any]) -> dict[str, str]:
    """Every other spelling of a key, both ways."""
    known = SPELLINGS.get(raw["model_type"], {})
    return known | {own: other for other, own in known.items()}


def changed(raw: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in {**raw, key: value}.items() if v is not ABSENT}


def edits(raw: dict[str, Any], values: tuple[Any, ...]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    kind, other = raw["model_type"], spellings(raw)
    for key in dict.fromkeys((*raw, *FIELDS[kind], *SPELLINGS.get(kind, {}), *ROPE, *OTHERS)):
        if key in ("model_type", "transformers_version", "architectures"):
            continue
        for value in values:
            yield key, value, changed(raw, key, value)
        if key in raw and key in other:
            moved = {k: v for k, v in raw.items() if k != key}
            yield key, "other spelling", {**moved, other[key]: raw[key]}
            for value in values:
                yield key, f"{value!r:.20} in the other spelling", changed(moved, other[key], value)
    for name in SECTIONS if kind == "dbrx" else ():
        for key in {*raw[name], *SECTIONS[name]}:
            for value in values:
                yield f"{name}.{key}", value, {**raw, name: changed(raw[name], key, value)}


def check(name: str, folder: Path, values: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    at = directory(name, folder)
    assert at.differs(at.raw, ()) is None
    found = []
    for key, value, config in edits(at.raw, values):
        if key == "tie_word_embeddings" and value is True and not at.raw[key]:
            continue  # a head of its own beside a tied flag: the embedding, with a warning (test_checkpoint; transformers 4, not 5)
        names = (key, spellings(at.raw).get(key, key))
        wrong = at.differs(config, names)
        if wrong is not None:
            shown = "absent" if value is ABSENT else f"{value!r:.40}"
            found.append(f"{name}: {key} = {shown}: {wrong}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [*QUICK, *DEFAULTED])
def test_a_key_that_is_missing_or_null_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, (ABSENT, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*cases.CONFIGS, *DEFAULTED])
def test_every_key_of_every_type(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, (ABSENT, None, *WRONG))


def declared(config: Any) -> dict[str, tuple[set[type], bool, Any]]:
    """The fields of a config class: the types, whether null is one of them, and the default."""
    found = {}
    hints = typing.get_type_hints(config, localns={"torch": torch, **vars(tf.configuration_utils)})
    for field in dataclasses.fields(config):
        kinds = set(typing.get_args(hints[field.name])) or {hints[field.name]}
        plain = {typing.get_origin(k) or k for k in kinds} - {type(None)}
        found[field.name] = (plain, type(None) in kinds, field.default)
    return found


@pytest.mark.parametrize("kind", sorted(FIELDS))
def test_defaults_are_those_of_transformers(kind: str) -> None:
    """Drift: every key we read is a field there, of the same type, with the same default; null where it may be null there."""
    config = type(tf.AutoConfig.for_model(kind))
    sections = {name: type(getattr(tf.AutoConfig.for_model(kind), name)) for name in (SECTIONS if kind == "dbrx" else ())}
    for ours, theirs in [(FIELDS[kind], declared(config)), *((SECTIONS[n], declared(c)) for n, c in sections.items())]:
        for key, want in ours.items():
            kinds, null, default = theirs[key]
            given = want.kind if isinstance(want, Maybe) else want if isinstance(want, type) else type(want)
            assert set(given if isinstance(given, tuple) else (given,)) <= kinds, (kind, key, kinds)
            if isinstance(want, type):
                continue
            assert null == (isinstance(want, Maybe) and want.null), (kind, key)
            assert default == (want.default if isinstance(want, Maybe) else want), (kind, key, default)
    assert config.default_theta == ROPE_THETA.get(kind, ANY_ROPE_THETA)
    fields = declared(config)
    known = {other: own if own in fields else other for other, own in config.attribute_map.items()}
    swapped = {own: other for other, own in config.attribute_map.items() if own not in fields}
    assert {k: v for k, v in known.items() if k != v} | swapped == {k: v for k, v in SPELLINGS.get(kind, {}).items() if k != "n_embed"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}
READ: tuple[dict[str, Any], ...] = (  # changes of a llama's config.json that are served, as transformers reads them
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}},
    {"rope_parameters": {**YARN, "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}, "original_max_position_embeddings": 32},
    {"rope_parameters": YARN, "original_max_position_embeddings": 64},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "original_max_position_embeddings": 32},
    {"rope_parameters": LLAMA3, "rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500},
    {"rope_parameters": {**PLAIN, "rope_theta": 5e5}, "rope_theta": 5e5, "rope_scaling": YARN},
    {"rope_parameters": None, "rope_scaling": None, "rope_theta": 5e5},
    {"rope_parameters": {"type": "linear", "factor": 2}},
    {"torch_dtype": "bfloat16", "dtype": None},
    {"num_key_value_heads": 2, "head_dim": None},
)
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rope_parameters": {**PLAIN, "rope_theta": 5e5}, "rope_scaling": YARN}, "contradicts itself: rope_scaling .*yarn.* rope_parameters"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": YARN}, "contradicts itself: .*write one of them"),
    ({"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}}, "contradicts itself"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs 'factor'"),
    ({"rope_parameters": {**YARN, "factor": "4"}}, "sets factor: '4' for rope"),
    ({"rope_parameters": {**YARN, "original_max_position_embeddings": "32"}}, 'original_max_position_embeddings: "32"'),
    ({"rope_parameters": {"full_attention": PLAIN}}, "one object with the settings of all layers"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type .*yarn.* is unknown; known: default"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}}, "longrope needs 8 .* long_factor"),
    ({"rope_parameters": None, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": None, "rope_theta": None}, "rope_theta"),
    ({"num_hidden_layers": "2"}, 'num_hidden_layers: "2", but num_hidden_layers of a llama model is an integer'),
    ({"hidden_size": 10**400}, "hidden_size: a number of many digits"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"dtype": "float8_e4m3fn"}, 'dtype: "float8_e4m3fn", which is not supported; supported: float64'),
    ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
    ({"quantization_config": {"quant_method": "rayneuron"}}, "quantization_config"),
    ({"quantization_config": "fp8"}, "quantization_config"),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Directory:
    return directory("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("change", READ, ids=lambda change: json.dumps(change)[:80])
def test_rope_in_every_spelling_is_what_transformers_reads(llama: Directory, change: dict[str, Any]) -> None:
    raw = {k: v for k, v in llama.raw.items() if k != "rope_parameters"}
    if "rope_parameters" not in change and "rope_scaling" in change:
        raw["rope_parameters"] = PLAIN  # a model card's block pasted into a file that transformers 5 wrote
    llama.write({**raw, **change})
    arch = models.check(hub.read_config(llama.path), tp=1, max_model_len=64)
    assert llama.differs({**raw, **change}, ()) is None
    if "dtype" not in change and "head_dim" not in change:
        assert arch.rope != models.architecture(llama.raw).rope


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda part: str(part)[:60])
def test_refused_by_name(llama: Directory, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        models.check({**llama.raw, **change}, tp=1, max_model_len=64)


def test_two_spellings_that_differ_are_said(caplog: pytest.LogCaptureFixture) -> None:
    raw = {"model_type": "gpt2", **cases.GPT}
    assert models.architecture({**raw, "num_attention_heads": 8}).heads == 8
    assert "n_head: 4 and num_attention_heads: 8, two spellings of one thing; num_attention_heads counts" in caplog.text


def test_dtype_in_either_spelling() -> None:
    assert dtype_of({"torch_dtype": "bfloat16"}) == dtype_of({"dtype": "torch.bfloat16", "torch_dtype": "float16"}) == "bfloat16"
    assert dtype_of({"dtype": None, "torch_dtype": "float16"}) == "float16" and dtype_of({}) == "float32"


def test_hub_file_of_dbrx_has_its_theta_in_attn_config() -> None:
    raw = cases.CONFIGS["dbrx"]().to_dict()
    del raw["rope_parameters"]
    raw["attn_config"]["rope_theta"] = 500000
    assert models.architecture(raw).rope.theta == 5e5
    with pytest.raises(CheckpointError, match="attn_config.rope_theta 500000, rope_theta 10000"):
        models.architecture({**raw, "rope_parameters": PLAIN})


# What the hub's files of later families call things: names that are gone, and what stands there instead.
SPELLED: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("gemma3_text", ("rope_parameters", "layer_types"), {
        "rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }),
    ("gemma3_text", ("rope_parameters",), {"rope_parameters": {"sliding_attention": {"rope_theta": 3e4}}, "rope_theta": 5e5}),
    ("phi3", ("rope_parameters",), {
        "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [1.5] * 8}, "original_max_position_embeddings": 64,
    }),
    ("gpt_oss", ("rope_parameters", "layer_types"), {}),
    ("stablelm", ("rope_parameters",), {"rope_theta": 5e5}),
    ("granite", ("rope_parameters",), {"rope_theta": 5e5, "residual_multiplier": 1}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "gone", "change"), [SPELLED[0], *(pytest.param(*s, marks=pytest.mark.slow) for s in SPELLED[1:])])
def test_hub_files_of_later_families(name: str, gone: tuple[str, ...], change: dict[str, Any], tmp_path: Path) -> None:
    at = directory(name, tmp_path)
    raw = {k: v for k, v in at.raw.items() if k not in gone} | change
    assert at.differs(raw, ()) is None
    assert models.architecture(raw).rope != models.architecture(at.raw).rope


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("falcon", {"alibi": True}, "sets alibi: True, which is not supported for falcon models"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "no falcon model has together"),
        ("falcon", {"num_kv_heads": 2, "multi_query": False}, "num_kv_heads: 2 of num_attention_heads: 4, which needs new_decoder"),
        ("stablelm", {"qk_layernorm": True}, "sets qk_layernorm: True, which is not supported for stablelm models"),
        ("gemma2", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "sets attn_logit_softcapping: 0.0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "has an object for each of full_attention and sliding_attention"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier: 0.0, where a number above 0"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' of config.json is not supported for phi3"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5"),
        ("gpt_oss", {"model_type": "gemma3"}, "'gemma3' is not supported; did you mean 'gemma3_text'.*supported: arcee"),
    ],
)
def test_what_later_families_have_not_is_refused_by_name(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        models.check({**cases.CONFIGS[name]().to_dict(), **change}, tp=1, max_model_len=64)


@pytest.mark.parametrize(("name", "why"), [("gemma2", "soft-capped scores"), ("gpt_oss", "attention sinks")])
def test_flash_decoding_does_not_know_every_kind_of_score(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"shard_over_sequence does not go with {why}"):
        models.check(cases.CONFIGS[name]().to_dict(), tp=4, max_model_len=64, shard_over_sequence=True)
