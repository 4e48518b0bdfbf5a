"""Option files of other systems: every name of their documents, what each value becomes, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rayneuron import aliases, cli
from rayneuron.config import Deployment, SpeculativeConfig
from rayneuron.errors import ConfigError
from rayneuron.options import adapters, lmi, nxdi, properties, ray_llm, tnx, translation
from rayneuron.options.words import Translation, tell
from rayneuron.validation import keys

TABLES = {
    "lmi": lmi.OPTIONS,
    "tnx": {**tnx.PRETRAINED, **tnx.NEURON_CONFIG},
    "nxdi": {**nxdi.NEURON_CONFIG, **nxdi.SAMPLING},
    "lora": adapters.LORA,
    "server": lmi.SERVER,
    "ray": {**ray_llm.LLM_CONFIG, **ray_llm.DEPLOYMENT},
}


def names() -> list[tuple[str, str]]:
    """(system, name) of every name in the documents."""
    lines = [line for line in (Path(__file__).parent / "names.txt").read_text().splitlines() if not line.startswith("#")]
    return [(line.partition(",")[0], name) for line in lines for name in line.partition(": ")[2].split()]


def test_the_list_is_long() -> None:
    assert len(names()) == len(set(names())) and {system: sum(s == system for s, _ in names()) for system, _ in names()} == {
        "lmi": 82, "tnx": 15, "nxdi": 67, "lora": 17, "vllm": 263, "drafts": 33,
    }  # fmt: skip


@pytest.mark.parametrize(("system", "name"), [named for named in names() if named[0] not in TABLES])
def test_every_name_of_vllm_is_ours_or_means_something_or_is_refused_with_what_to_write(system: str, name: str) -> None:
    ours, refused = (SpeculativeConfig, aliases.DRAFTS) if system == "drafts" else (Deployment, aliases.REFUSED)
    assert name in ours.model_fields or name in refused or (system == "vllm" and aliases.means(name) is not None)
    if name in refused:
        assert any(part in refused[name] for part in ("leave it out", "write ", "name ", "set ", "convert ")), refused[name]


@pytest.mark.parametrize(("system", "name"), [named for named in names() if named[0] in TABLES])
def test_every_name_of_the_documents_is_applied_noted_or_refused(system: str, name: str) -> None:
    word = TABLES[system][name]
    assert word.kind in ("applied", "noted", "refused")
    if word.kind == "noted":
        assert word.note
    if word.kind == "refused":  # says what to do instead
        assert any(part in word.refused for part in ("leave it out", "write ", "merge ", "name ", "with ", "beside")), word.refused


def test_a_table_names_only_keys_that_exist() -> None:
    known = {*keys(Deployment), "http_options.host", "http_options.port"}
    for table in TABLES.values():
        for name, word in table.items():
            for key in (word.key or "model").split(" and "):
                root = key.removeprefix("http_options.")
                assert key in known or "http_options" in key or key.startswith("sampling_defaults"), (name, key, root)


def told(table: Mapping[str, Any], **args: Any) -> dict[str, Any]:
    out = Translation()
    tell(out, table, args, lambda name: f"file:1: {name}", "it")
    return out.assigned


GOLDEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("lmi", {"tensor_parallel_degree": "4", "max_rolling_batch_size": "8"}, {"tensor_parallel": 4, "max_num_seqs": 8}),
    ("lmi", {"rolling_batch": "auto", "entryPoint": "djl_python.transformers_neuronx", "unroll": "None"}, {}),
    ("lmi", {"n_positions": "512", "context_length_estimate": "256, 512"}, {"max_model_len": 512, "buckets.context_encoding": [256, 512]}),
    ("lmi", {"quantize": "static_int8"}, {"quantization": "int8"}),
    ("lmi", {"load_in_8bit": "True"}, {"quantization": "int8"}),
    ("lmi", {"load_in_8bit": "False"}, {"quantization": None}),
    ("lmi", {"neuron_optimize_level": "3"}, {"compile.optimization": 3}),
    ("lmi", {"enable_mixed_precision_accumulation": "true"}, {"compile.mixed_accumulation": True}),
    ("lmi", {"enable_saturate_infinity": "false"}, {"compile.flags": ""}),
    ("lmi", {"enable_saturate_infinity": "true"}, {"compile.flags": "--enable-saturate-infinity"}),
    ("lmi", {"compiled_graph_path": "s3://b/p"}, {"compile.cache": "s3://b/p"}),
    ("lmi", {"group_query_attention": "shard-over-heads"}, {"group_query_attention": "shard-over-heads"}),
    ("lmi", {"dtype": "bf16"}, {"dtype": "bf16"}),
    ("lmi", {"all_reduce_dtype": "bfloat16"}, {"compile.reduce_dtype": "bf16"}),
    ("lmi", {"model_loading_timeout": "1600", "predict_timeout": "60"}, {"group.load_s": 1600.0, "limits.request_timeout_s": 60.0}),
    ("lmi", {"tgi_compat": "true", "output_formatter": "jsonlines"}, {"lmi.tgi_compat": True, "lmi.output_formatter": "jsonlines"}),
    ("lmi", {"max_model_len": "256", "max_num_batched_tokens": "128"}, {"max_model_len": 256, "prefill_chunk_tokens": 128}),
    ("lmi", {"override_neuron_config": "{'fused_qkv': True, 'tp_degree': 2}"}, {"fused_qkv": True, "tensor_parallel": 2}),
    ("lmi", {"enable_lora": "true", "max_loras": "2"}, {"lora.enabled": True, "lora.max_loras": 2}),
    ("lmi", {"enable_lora": "true", "adapters": "more", "lora_target_modules": '["q_proj"]'},
     {"lora.enabled": True, "lora.target_modules": ["q_proj"]}),
    (
        "nxdi",
        {"lora_config": {"max_loras": 1, "max_lora_rank": 8, "lora_ckpt_paths": ["a : /x/a", "b:/x/b"], "target_modules": ["q_proj"],
                         "lora_bias": "none", "dynamic_multi_lora": False, "lora_ckpt_paths_cpu": None, "max_cpu_loras": 100,
                         "batch_size": 2, "lora_memory_transpose": True, "lora_shard_linear_layer": True, "is_context_encoding": False,
                         "eviction_policy": "lru", "lfu_decay_period": 128, "base_model_quantized": False, "enable_base_model_only": True}},
        {"lora.max_loras": 2, "lora.max_lora_rank": 8, "lora.target_modules": ["q_proj"],
         "lora.lora_modules": {"a": "/x/a", "b": "/x/b"}},
    ),
    ("nxdi", {"lora_config": SimpleNamespace(lora_ckpt_paths={"a": "/x"})}, {"lora.lora_modules": {"a": "/x"}}),
    ("nxdi", {"lora_config": SimpleNamespace(max_loras=3)}, {"lora.lora_modules": {}, "lora.max_loras": 3}),
    ("nxdi", {"lora_config": None}, {}),
    ("lmi", {"enable_lora": "false", "trust_remote_code": "false", "speculative_length": "0"}, {}),
    ("server", {"engine": "Python", "job_queue_size": "50", "maxWorkers": "2"}, {"limits.max_waiting": 50, "serving.num_replicas": 2}),
    ("tnx", {"batch_size": 2, "tp_degree": 8, "amp": "f16"}, {"max_num_seqs": 2, "tensor_parallel": 8, "dtype": "fp16"}),
    ("tnx", {"n_positions": [128, 256]}, {"max_model_len": 256, "buckets.token_generation": [128, 256]}),
    ("tnx", {"batch_size": [1, 4]}, {"max_num_seqs": 4, "buckets.batch": [1, 4]}),
    ("tnx", {"sequence_parallel_norm_threshold": 128}, {"sequence_parallel": True}),
    ("nxdi", {"seq_len": 256, "max_length": 256, "torch_dtype": "torch.bfloat16"}, {"max_model_len": 256, "dtype": "bf16"}),
    ("nxdi", {"quantized": True}, {"quantization": "int8"}),
    ("nxdi", {"quantized": True, "quantization_dtype": "f8e4m3"}, {"quantization": "f8e4m3"}),
    ("nxdi", {"quantized": False, "quantization_dtype": "int8"}, {"quantization": None}),
    ("nxdi", {"kv_cache_quant": True}, {"kv_dtype": "f8e4m3"}),
    ("nxdi", {"pa_num_blocks": 64, "pa_block_size": 32}, {"kv_cache_tokens": 2048, "block_size": 32}),
    (
        "nxdi",
        {"context_encoding_buckets": [1024, 512], "prefix_buckets": [512]},
        {"buckets.context_encoding": [512, 1024], "buckets.prefix": [512]},
    ),
    ("nxdi", {"flash_decoding_enabled": True, "async_mode": True}, {"shard_over_sequence": True, "compile.async_mode": True}),
    (
        "nxdi",
        {"on_device_sampling_config": {"do_sample": False, "global_topk": 64, "deterministic": True}},
        {
            "on_device_sampling.neuron_compat": True, "on_device_sampling.global_topk": 64,
            "on_device_sampling.deterministic": True, "sampling_defaults.temperature": 0.0,
        },
    ),
    ("nxdi", {"speculation_length": 0, "is_medusa": False, "trace_tokengen_model": True, "padding_side": "right"}, {}),
    (
        "nxdi",
        {"speculation_length": 5, "enable_eagle_speculation": True, "enable_fused_speculation": True, "trace_tokengen_model": False,
         "enable_eagle_draft_input_norm": True, "spec_batch_size": 1, "worker_cls": "a.b",
         "fused_spec_config": {"worker_cls": "a.b", "draft_model_path": "/d",
                               "draft_config": {"neuron_config": {"is_eagle_draft": True, "quantized": True}}}},
        {"speculative_config.method": "eagle", "speculative_config.model": "/d", "speculative_config.num_speculative_tokens": 5},
    ),
    (
        "nxdi",
        {"speculation_length": 4, "enable_fused_speculation": True, "draft_model_path": "/d",
         "draft_config": {"neuron_config": {"quantized": True, "tp_degree": 2}}},
        {"speculative_config.method": "draft_model", "speculative_config.model": "/d", "speculative_config.num_speculative_tokens": 4,
         "speculative_config.quantization": "int8", "speculative_config.draft_tensor_parallel_size": 2},
    ),
    (
        "nxdi",
        {"is_medusa": True, "medusa_speculation_length": 64, "num_medusa_heads": 4, "medusa_tree": [[0], [1]], "speculation_length": 9},
        {"speculative_config.method": "medusa", "speculative_config.num_speculative_tokens": 4},
    ),
    ("nxdi", {"num_medusa_heads": 4, "is_medusa": False}, {}),
    (
        "lmi",
        {"speculative_draft_model": "org/small", "speculative_length": "4", "draft_model_tp_size": "2", "draft_model_compiled_path": "/g"},
        {"speculative_config.model": "org/small", "speculative_config.num_speculative_tokens": 4,
         "speculative_config.draft_tensor_parallel_size": 2},
    ),
    ("lmi", {"draft_model_id": "d", "spec_length": "3"}, {"speculative_config.model": "d", "speculative_config.num_speculative_tokens": 3}),
    ("lmi", {"speculative_length": "5", "spec_length": "1", "draft_model_tp_size": "2"}, {}),  # they say nothing without a draft model
    ("lmi", {"speculative_config": '{"model": "/d"}'}, {"speculative_config": {"model": "/d"}}),
]  # fmt: skip


@pytest.mark.parametrize(("system", "args", "ours"), GOLDEN, ids=[" ".join(args) for _, args, _ in GOLDEN])
def test_what_a_value_becomes(system: str, args: dict[str, Any], ours: dict[str, Any]) -> None:
    assert told(TABLES[system], **args) == ours


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("lmi", {"tensor_parallel_degree": "max"}, "write the number of cores"),
    ("lmi", {"tensor_parallel_degree": "four"}, "must be a whole number, got 'four'"),
    ("lmi", {"rolling_batch": "disable"}, "write auto"),
    ("lmi", {"batch_size": "4"}, "write option.max_rolling_batch_size"),
    ("lmi", {"quantize": "awq"}, "must be one of static_int8, int8"),
    ("lmi", {"n_positionz": "4"}, "did you mean n_positions?"),
    ("lmi", {"adapters": "x"}, "enable_lora is not true; write option.enable_lora=true"),
    ("nxdi", {"lora_config": {"max_lora": 2}}, "lora_config.max_lora: LoraServingConfig knows no max_lora; did you mean max_loras?"),
    ("nxdi", {"lora_config": {"lora_bias": "all"}}, "lora_config.lora_bias: lora_bias is refused: adapters with biases are not served"),
    ("nxdi", {"lora_config": {"dynamic_multi_lora": True}}, "adapters lie in the device from the start on; write all in lora_ckpt_paths"),
    ("nxdi", {"lora_config": {"lora_ckpt_paths_cpu": {"a": "/x"}}}, "write all in lora_ckpt_paths, or on device cpu lora.allow_runtime"),
    ("nxdi", {"lora_config": {"lora_ckpt_paths": ["a:/x", "a:/y"]}}, "names one adapter twice"),
    ("nxdi", {"lora_config": {"lora_ckpt_paths": "a"}}, "must be {id: directory} or a list of 'id : directory', got 'a'"),
    ("nxdi", {"lora_config": {"lora_ckpt_json": "/nowhere"}}, "/nowhere cannot be read as an object with lora-ckpt-paths"),
    ("nxdi", {"lora_config": {"target_modules": "all-linear"}}, "must be a list of names of modules here"),
    ("ray", {"lora_config": {"dynamic_lora_loading_path": "s3://x"}}, "write lora: {lora_modules: {name: PEFT directory}}"),
    ("lmi", {"speculative_draft_model": "x", "draft_model_id": "y"}, "say different things of speculative_config.model"),
    ("lmi", {"speculative_draft_model": "x", "speculative_length": "many"}, "must be a whole number"),
    ("lmi", {"entryPoint": "model.py"}, "handlers of your own are not run"),
    ("lmi", {"trust_remote_code": "true"}, "never run; leave it out"),
    ("lmi", {"override_neuron_config": "[1]"}, "must be a mapping"),
    ("lmi", {"override_neuron_config": "{'nope': 1}"}, "NeuronConfig knows no nope"),
    ("lmi", {"dtype": "bf16", "amp": "f32"}, "say different things of dtype"),
    ("lmi", {"gpu_memory_utilization": "0.9"}, "write kv_cache_tokens"),
    ("server", {"engine": "OnnxRuntime"}, "write engine=Python"),
    ("nxdi", {"speculation_length": 5}, "5 says nothing of what drafts; a draft model is speculative_config"),
    ("nxdi", {"fused_spec_config": {"worker_cls": "a"}}, "names no draft_model_path; write the directory"),
    ("nxdi", {"fused_spec_config": {"draft_model_path": "/d", "depth": 2}}, "FusedSpecNeuronConfig knows no depth"),
    ("nxdi", {"enable_eagle_speculation": "yes"}, "must be true or false"),
    ("nxdi", {"seq_len": 256, "n_positions": 128}, "say different things of max_model_len"),
    ("tnx", {"cast_logits_dtype": "bfloat16"}, "logits are float32"),
]


@pytest.mark.parametrize(("system", "args", "said"), WRONG, ids=[" ".join(args) for _, args, _ in WRONG])
def test_a_wrong_one_says_where_and_what_to_write(system: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        told(TABLES[system], **args)
    assert said in caught.value.message and caught.value.message.startswith("file:1: ")


def folder(tmp_path: Path, text: str, tiny: bool = True) -> Path:
    (tmp_path / properties.FILE).write_text(text + ("\noption.model_id=demo:random:tiny\n" if tiny else ""))
    return tmp_path


def test_java_properties_are_read_as_java_does() -> None:
    text = "# note\n! note\n\na=1\nb : two words \nc\td\nlong=x, \\\n    y\nkey\\ with\\=signs = v\nempty=\n"
    read = {key: value for key, (value, _) in properties.read(text).items()}
    assert read == {"a": "1", "b": "two words", "c": "d", "long": "x, y", "key with=signs": "v", "empty": ""}
    assert properties.read(text)["long"][1] == 7
    with pytest.raises(ConfigError, match="serving.properties:2: a stands here and in line 1"):
        properties.read("a=1\na=2")


PRECEDENCE: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("option.tensor_parallel_degree=4", {"OPTION_TENSOR_PARALLEL_DEGREE": "2", "TENSOR_PARALLEL_DEGREE": "8"}, {"tensor_parallel": 4}),
    ("", {"OPTION_TENSOR_PARALLEL_DEGREE": "2", "TENSOR_PARALLEL_DEGREE": "8"}, {"tensor_parallel": 2}),
    ("", {"TENSOR_PARALLEL_DEGREE": "8", "SM_NUM_GPUS": "16"}, {"tensor_parallel": 8}),
    ("", {"SM_NUM_GPUS": "16"}, {"tensor_parallel": 16}),
    ("", {"MAX_BATCH_SIZE": "5"}, {"max_num_seqs": 5}),
    ("", {"OPTION_MAX_ROLLING_BATCH_SIZE": "6", "MAX_BATCH_SIZE": "5"}, {"max_num_seqs": 6}),
    ("", {}, {"max_num_seqs": 32, "model.any_name": True, "http_options.port": 8080}),
    ("", {"HF_MODEL_QUANTIZE": "static_int8"}, {"quantization": "int8"}),
    ("", {"OPTION_QUANTIZE": ""}, {}),
    ("", {"OPTION_ENTRYPOINT": "djl_python.transformers_neuronx"}, {"device": "neuron"}),
    ("job_queue_size=9", {"SERVING_JOB_QUEUE_SIZE": "7"}, {"limits.max_waiting": 9}),
    ("", {"MAX_CONCURRENT_REQUESTS": "7"}, {"limits.max_waiting": 7}),
    ("", {"NEURON_CONTEXT_LENGTH_ESTIMATE": "[128, 256]"}, {"buckets.context_encoding": [128, 256]}),
]


@pytest.mark.parametrize(("text", "variables", "ours"), PRECEDENCE)
def test_the_file_goes_before_the_variables(tmp_path: Path, text: str, variables: dict[str, str], ours: dict[str, Any]) -> None:
    assigned = properties.told(folder(tmp_path, text), variables).assigned
    assert {key: assigned.get(key) for key in ours} == ours


def test_the_hub_model_goes_before_the_option() -> None:
    variables = {"HF_MODEL_ID": "a/b", "OPTION_MODEL_ID": "c/d", "HF_REVISION": "main"}
    assigned = properties.told(None, variables).assigned
    assert (assigned["model.path"], assigned["model.revision"]) == ("a/b", "main")
    with pytest.raises(ConfigError, match="set HF_MODEL_ID"):
        properties.told(None, {})


def test_a_folder_is_served_as_the_container_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document's quick start, translated, read again as a deployment file, and checked as one that is served."""
    text = "engine=Python\noption.entryPoint=djl_python.transformers_neuronx\noption.rolling_batch=auto\noption.tensor_parallel_degree=2"
    text += "\noption.max_rolling_batch_size=8\noption.n_positions=128\noption.unroll=4"
    assert cli.main(["translate", str(folder(tmp_path, text))]) == 0
    out = capsys.readouterr().out
    assert f"# {tmp_path}/{properties.FILE}:7: unroll changes nothing" in out
    content = yaml.safe_load(out)
    args = content["applications"][0]["args"]
    assert args == {
        "model": {"path": "demo:random:tiny", "any_name": True}, "device": "neuron", "tensor_parallel": 2, "max_num_seqs": 8,
        "max_model_len": 128,
    }  # fmt: skip
    assert content["http_options"] == {"host": "0.0.0.0", "port": 8080}
    (tmp_path / "made.yaml").write_text(out)
    for what in ([str(tmp_path / "made.yaml"), "--device", "cpu"], ["--lmi", str(tmp_path), "--device", "cpu"]):
        assert cli.main(["config", *what]) == 0
        served = yaml.safe_load(capsys.readouterr().out)["applications"][0]["args"]
        assert (served["max_num_seqs"], served["device"], served["max_model_len"]) == (8, "cpu", 128)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=1\noption.n_positions=12x", ":1: LMI's server knows no a"),
        ("\noption.n_positions=12x", ":2: n_positions must be a whole number, got '12x'"),
        ("\n\noption.n_positions=1", ":3: "),  # refused by our own key's range, in the line that said it
        ("option.max_rolling_batch_size=0", ":1: "),
    ],
)
def test_errors_say_file_and_line(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", str(folder(tmp_path, text))]) == 2
    assert f"{properties.FILE}{said}" in capsys.readouterr().err


def test_the_file_may_be_named_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "serving.properties").write_text("option.model_id=demo:smollm2\n")
    assert cli.main(["translate", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert cli.main(["translate", str(tmp_path / "serving.properties")]) == 0 and capsys.readouterr().out == told


def test_nothing_to_translate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", str(tmp_path)]) == 2
    assert "holds neither serving.properties nor neuron_config.json" in capsys.readouterr().err


def test_nxds_file_of_adapters(tmp_path: Path) -> None:
    """lora_ckpt_json, joined with the paths beside it; what it says of the host counts with dynamic_multi_lora only."""
    said = {"lora-ckpt-dir": "/ckpt", "lora-ckpt-paths": {"a": "one", "b": "/two"}, "lora-ckpt-paths-cpu": {"c": "three"}}
    (tmp_path / "lora.json").write_text(json.dumps(said))
    config = {"max_loras": 2, "lora_ckpt_json": str(tmp_path / "lora.json"), "lora_ckpt_paths": {"d": "/d"}}
    assert told(TABLES["nxdi"], lora_config=config) == {
        "lora.max_loras": 3, "lora.lora_modules": {"a": "/ckpt/one", "b": "/two", "d": "/d"}
    }  # fmt: skip
    twice, dynamic = {"lora_ckpt_paths": {"a": "/x"}}, {"dynamic_multi_lora": True}
    for more, why in ((twice, "both in lora_ckpt_json and in"), (dynamic, "lora-ckpt-paths-cpu")):
        with pytest.raises(ConfigError, match=why):
            told(TABLES["nxdi"], lora_config={**config, **more})


def test_lmis_folder_of_adapters(tmp_path: Path) -> None:
    """Those beside the file are loaded where LoRA is on; another folder, and one that is not there."""
    for place in ("adapters/en", "adapters/de", "more/fr"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "adapters" / "README").write_text("")

    def named(text: str, **variables: str) -> Any:
        return properties.told(folder(tmp_path, text), variables).assigned.get("lora.lora_modules")

    on = "option.enable_lora=true\n"
    assert named("") is None and named("option.enable_lora=false") is None
    assert named(on) == {name: str(tmp_path / "adapters" / name) for name in ("de", "en")}
    assert named(on + "option.adapters=more") == {"fr": str(tmp_path / "more/fr")}
    assert named(on, OPTION_ADAPTERS=str(tmp_path / "more")) == {"fr": str(tmp_path / "more/fr")}
    assert named(on, OPTION_LORA_MODULES='{"x": "/x"}') == {"x": "/x"}
    with pytest.raises(ConfigError, match="adapters: .*/none holds no folders with adapters"):
        named(on + "option.adapters=none")


def test_nxds_saved_config(tmp_path: Path) -> None:
    config = {"neuron_config": {"tp_degree": 2, "seq_len": 64, "batch_size": 4}, "_name_or_path": "demo:random:tiny", "hidden_size": 64}
    (tmp_path / translation.NXDI).write_text(json.dumps(config))
    file, _ = translation.read(tmp_path)
    (made,) = file.deployments.values()
    assert (made.model.path, made.tensor_parallel, made.max_model_len, made.max_num_seqs) == ("demo:random:tiny", 2, 64, 4)
    (tmp_path / translation.NXDI).write_text(json.dumps({"neuron_config": {"speculation_length": 5}}))
    with pytest.raises(ConfigError, match=r"neuron_config.json: neuron_config.speculation_length: .*draft model"):
        translation.read(tmp_path)
    drafts = {"neuron_config": {"speculation_length": 5, "enable_eagle_speculation": True}, "_name_or_path": "demo:random:tiny"}
    (tmp_path / translation.NXDI).write_text(json.dumps({**drafts, "fused_spec_config": {"draft_model_path": "/heads"}}))
    (made,) = translation.read(tmp_path)[0].deployments.values()
    said = made.speculative_config
    assert said is not None and (said.method, said.model, said.num_speculative_tokens) == ("eagle", "/heads", 5)
    (tmp_path / translation.NXDI).write_text(json.dumps(drafts))
    with pytest.raises(ConfigError, match="method eagle needs model: a directory with such heads"):
        translation.read(tmp_path)


def test_a_draft_model_of_lmis_is_served_as_one(tmp_path: Path) -> None:
    text = "option.tensor_parallel_degree=2\noption.speculative_draft_model=demo:random:tiny\noption.speculative_length=4"
    (made,) = translation.lmi(folder(tmp_path, text), {}, {}, {})[0].deployments.values()
    said = made.speculative_config
    assert said is not None and (said.method, said.model, said.num_speculative_tokens) == ("draft_model", "demo:random:tiny", 4)
    text += "\noption.draft_model_tp_size=4"
    with pytest.raises(ConfigError, match=r"serving.properties.*draft_tensor_parallel_size 4 beside tensor_parallel 2"):
        translation.lmi(folder(tmp_path, text), {}, {}, {})


RAY = """
applications:
- name: llms
  route_prefix: /llm
  import_path: ray.serve.llm:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: small, model_source: demo:random:tiny}
      deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 2}}
      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 64, max_num_seqs: 3}
      accelerator_type: A10G
"""


def test_ray_serve_llm(tmp_path: Path) -> None:
    (tmp_path / "llm.yaml").write_text(RAY)
    file, notes = translation.read(tmp_path / "llm.yaml")
    ((name, made),) = file.deployments.items()
    assert (name, file.content["applications"][0]["route_prefix"]) == ("llms", "/llm")
    assert (made.model.name, made.model.path, made.tensor_parallel) == ("small", "demo:random:tiny", 2)
    assert (made.max_model_len, made.max_num_seqs, made.serving.most_replicas) == (64, 3, 2)
    assert any("accelerator_type" in note for note in notes)
    (tmp_path / "llm.yaml").write_text(RAY.replace("max_num_seqs: 3", "gpu_memory_utilization: 0.9"))
    with pytest.raises(ConfigError, match="engine_kwargs .*write kv_cache_tokens"):
        translation.read(tmp_path / "llm.yaml")
