"""Pools in a deployment file: what the prefill pool is made of, and what both must say alike."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

from rayneuron import deployment_file
from rayneuron.config import Deployment, parse
from rayneuron.errors import ConfigError
from rayneuron.group_config import PREFILL_POLICY, prefill_of


def pooled(**prefill: object) -> Deployment:
    return parse({"model": {"path": "/m"}, "max_num_seqs": 16, "dtype": "bf16", "pools": {"prefill": prefill}})


def test_a_prefill_pool_is_the_rest_of_the_file_with_its_own_keys() -> None:
    made = pooled(tensor_parallel=4, buckets={"batch": [2]}, serving={"num_replicas": 3})
    there = prefill_of(made)
    assert (there.model.path, there.dtype, there.tensor_parallel, there.max_num_seqs) == ("/m", "bf16", 4, 4)
    assert (there.buckets.batch, there.serving.num_replicas, made.serving.num_replicas) == ([2], 3, None)
    scaled = {"model": {"path": "/m"}, "serving": {"num_replicas": 5, "drain_timeout_s": 7.0}, "pools": {}}
    assert prefill_of(parse(scaled)).serving.num_replicas is None, "how many there are is each pool's own"
    assert prefill_of(parse(scaled)).serving.drain_timeout_s == 7.0


def test_who_computes_one_token_has_no_drafts() -> None:
    words = {"model": {"path": "/m"}, "speculative_config": {"model": "/draft"}, "pools": {"prefill": {"speculative_config": False}}}
    here, there = parse(words), prefill_of(parse(words))
    assert here.speculative_config is not None and here.speculative_config.model == "/draft" and there.speculative_config is None


def test_each_pool_scales_by_what_it_is_asked_for() -> None:
    own = {"autoscaling": {"max_replicas": 4}}
    words = {"model": {"path": "/m"}, "serving": {"autoscaling": {"max_replicas": 2}}, "pools": {"prefill": {"serving": own}}}
    here, there = parse(words).serving.autoscaling, prefill_of(parse(words)).serving.autoscaling
    assert here is not None and there is not None and (here.max_replicas, there.max_replicas) == (2, 4)
    assert there.policy.policy_function == PREFILL_POLICY and here.policy.policy_function.startswith("ray.serve.")
    module, _, name = PREFILL_POLICY.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    own["autoscaling"] = {"max_replicas": 4, "policy": {"policy_function": "mine:decide"}}
    scaling = prefill_of(parse(words)).serving.autoscaling
    assert scaling is not None and scaling.policy.policy_function == "mine:decide"


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        ({"dtype": "fp32"}, "pools.prefill: dtype is 'fp32' there and 'bf16' for decoding"),
        ({"model": {"path": "/other"}}, "pools.prefill: model.path is '/other' there and '/m' for decoding"),
        ({"block_size": 32}, "pools.prefill: block_size is 32 there and None for decoding"),
        ({"kv_dtype": "f8e4m3"}, "pools.prefill: kv_dtype is 'f8e4m3' there"),
        ({"on_device_sampling": {"neuron_compat": True}}, "pools.prefill: on_device_sampling.neuron_compat is True there"),
        ({"tensor_paralel": 2}, "pools.prefill: unknown key tensor_paralel; did you mean tensor_parallel?"),
        ({"tensor_parallel": 0}, "pools.prefill: tensor_parallel: must be at least 1, got 0"),
        ({"buckets": {"batch": []}}, "pools.prefill: buckets.batch: a bucket list needs"),
        ({"lora": {"lora_modules": {"a": "/a"}}}, "there and None for decoding, and both pools must have the same"),
        ({"pools": {"lease_s": 1.0}}, "pools are not nested"),
        ({"speculative_config": {"method": "ngram"}}, "pools.prefill: speculative_config is of those that decode"),
        ({"serving": {"autoscaling": {"min_replicas": 0}}}, "pools.prefill: serving.autoscaling.min_replicas is 0, and nobody would ask"),
        ({"compile": {"async_mode": True}, "pipeline_parallel": 2}, "compile.async_mode goes without pipeline_parallel"),
    ],
)
def test_pools_that_could_not_hand_over_are_refused(prefill: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        pooled(**prefill)


def test_a_wrong_key_of_a_pool_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    args = "{model: {path: /m}, dtype: fp32,\n pools: {prefill: {\n  max_num_seqs: 2,\n  dtype: bf16}}}"
    file.write_text(f"applications:\n- name: one\n  import_path: rayneuron.serve.app:build\n  args: {args}\n")
    with pytest.raises(ConfigError, match=r"f.yaml:7: application one: pools.prefill: dtype is 'bf16' there and 'fp32'"):
        deployment_file.read(file)


def test_a_filled_file_with_pools_can_be_served(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(
        "applications:\n- {name: one, import_path: 'rayneuron.serve.app:build',"
        " args: {model: {path: /m}, pools: {prefill: {max_num_seqs: 2}}}}\n"
    )
    read = deployment_file.read(file)
    assert list(read.pools) == ["one", "one prefill"] and read.pools["one prefill"].max_num_seqs == 2
    file.write_text(yaml.safe_dump(read.filled()))
    again = deployment_file.read(file)
    assert again.filled() == read.filled() and again.pools["one prefill"].max_num_seqs == 2
