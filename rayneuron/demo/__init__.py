"""Models to try things with: SmolLM2-135M-Instruct, and random Llamas of real sizes; written once, offline afterwards."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rayneuron import settings
from rayneuron.demo import llama, smollm2
from rayneuron.errors import ConfigError

_log = logging.getLogger(__name__)

SIZES = llama.SIZES
_UNKNOWN = f"no demo model is called {{!r}}; write smollm2, or random:SIZE with SIZE one of {', '.join(SIZES)}"


def ensure(name: str = "smollm2", dtype: str = "bf16", out: Path | None = None) -> Path:
    """The directory of the demo model, converted now if this is the first call on this machine (seconds).

    The file's 4- and 8-bit values are not exactly representable in bf16 (269 MB, the default); `dtype="fp32"` keeps them to the bit.
    Raises ConfigError for another name, CheckpointError where the file cannot be had or is damaged.
    """
    if name != "smollm2":
        raise ConfigError(_UNKNOWN.format(name))
    target = out or _models() / f"smollm2-135m-instruct-{llama.checked(dtype)}"
    return _build_once(target, lambda folder: smollm2.write(smollm2.gguf_file(), folder, dtype))


def random(size: str, seed: int = 0, dtype: str = "bf16", out: Path | None = None) -> Path:
    """The directory of a Llama of this size ("tiny" or "llama-tiny", see SIZES) with random weights, written if it is not there yet.

    A size with the vocabulary of SmolLM2 takes that model's tokenizer along; the test sizes bring a small one of their own.
    """
    name = size.removeprefix("llama-")
    _check_size(name, size)
    target = out or _models() / f"llama-{name}-{llama.checked(dtype)}-seed{seed}"
    tokenizer = None if SIZES[name].vocab == llama.SMALL_VOCAB else ensure()
    return _build_once(target, lambda folder: llama.write_random(SIZES[name], seed, folder, dtype, tokenizer))


def resolve(path: str) -> Path:
    """The directory of "demo:smollm2" or "demo:random:SIZE", made now if it is not there yet. Raises ConfigError."""
    kind, size = _named(path)
    return random(size) if kind == "random" else ensure(kind)


def located(path: str) -> Path | None:
    """As `resolve`, but nothing is made: None where a demo model is not on this machine yet. Raises ConfigError."""
    kind, size = _named(path)
    made = _models() / (f"llama-{size}-bf16-seed0" if kind == "random" else "smollm2-135m-instruct-bf16")
    return made if (made / "config.json").is_file() else None


def _named(path: str) -> tuple[str, str]:
    """demo:NAME or demo:random:SIZE as (name, size), which exist. Raises ConfigError."""
    kind, _, size = path.removeprefix("demo:").partition(":")
    name = size.removeprefix("llama-")
    if kind == "random":
        _check_size(name, size)
    elif kind != "smollm2" or size:
        raise ConfigError(_UNKNOWN.format(path.removeprefix("demo:")))
    return kind, name


def _check_size(name: str, said: str) -> None:
    if name not in SIZES:
        raise ConfigError(f"no random model has the size {said!r}; write one of {', '.join(SIZES)}")


def _models() -> Path:
    return settings.cache_dir() / "models"


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Let one process `build` the directory aside and move it into place whole; the others wait and find it.

    The lock is the kernel's: it is gone with the process that held it, however that ended.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            return target
        if target.exists():
            raise ConfigError(f"{target} exists and holds no config.json; name a directory that is not there yet")
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left; under the lock nobody else is writing it
        partial.mkdir()
        try:
            build(partial)
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _log.info("wrote the model directory %s", target)
    return target
