"""What drafts for the model of a deployment, another model or heads: found, and held against that model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron import models, sources
from rayneuron.config import Deployment
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import heads, words
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import read_config, read_json
from rayneuron.models.heads import Heads
from rayneuron.models.memory import share

KEY, METHOD = sources.DRAFTS, "speculative_config.method"
Find = Callable[[str], Path | None]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A directory that drafts. `raw`: config.json; `dtype`: our word of what it computes in; `limit`: positions it can place; `heads`: as
    data, where it is no model of its own."""

    path: Path
    raw: dict[str, Any]
    arch: Arch
    dtype: str
    quantization: str | None
    limit: int
    heads: Heads | None = None

    @property
    def most(self) -> int | None:
        """The most drafts of a row it can make, None where it can make any number."""
        return None if self.heads is None else self.heads.most

    @property
    def counted(self) -> Mapping[str, Any] | Heads:
        """What its memory follows from."""
        return self.raw if self.heads is None else self.heads


def draft_model(config: Deployment, path: Path, arch: Arch, length: int, find: Find) -> DraftModel | None:
    """What drafts for the model of `path`; None where neither a model nor heads do, or it is not here. `find`: the directory of a source.

    Raises ConfigError or CheckpointError, naming the key, where the two do not go together.
    """
    said = config.speculative_config
    if said is None or not said.within:
        return None
    with sources.named(KEY):
        there = path if said.model is None else find(said.model)
    if there is None:
        return None
    if said.by_heads:
        return _heads(config, path, there, arch, length)
    try:
        raw = read_config(there)
        if (kind := heads.kind(raw)) is not None:
            raise ConfigError(f"it holds {kind} heads and no model; write method: {kind}", param=METHOD)
        dtype = words.compute(said.dtype, raw)
        limit = min(models.position_limit(models.architecture(raw)) or length, length)
        made = models.check(raw, tp=config.tensor_parallel, max_model_len=limit, dtype=dtype, quantization=said.quantization)
        other = _differing(path, there)
    except (ConfigError, CheckpointError) as wrong:
        raise ConfigError(f"{KEY} {there}: {wrong.message}", param=wrong.param if wrong.param == METHOD else KEY) from None
    if made.vocab != arch.vocab:
        raise ConfigError(
            f"{KEY} {there} has a vocabulary of {made.vocab}, the model has {arch.vocab}, and a draft is a token of both; name a model of "
            "the same family, or write quantization: int8 without a model",
            param=KEY,
        )
    if other is not None:
        raise ConfigError(
            f"{KEY} {there} calls other tokens by the same ids, {other} among them; name a model with the same tokenizer", param=KEY
        )
    return DraftModel(there, raw, made, dtype, said.quantization, limit)


def _heads(config: Deployment, path: Path, there: Path, arch: Arch, length: int) -> DraftModel:
    """Heads for a model."""
    said = config.speculative_config
    assert said is not None
    try:
        raw = read_config(there)
        made = heads.read(said.method, raw, heads.shapes(there, config.model.allow_pickle), arch)
        share(made.arch, config.tensor_parallel)
    except (ConfigError, CheckpointError) as wrong:
        raise type(wrong)(f"{KEY} {there}: {wrong.message}", param=KEY) from None
    if made.most is not None and "num_speculative_tokens" in said.model_fields_set and said.num_speculative_tokens > made.most:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens {said.num_speculative_tokens} is more than the {made.most} heads of {there} draft; "
            f"write {made.most}, or leave it out",
            param="speculative_config.num_speculative_tokens",
        )
    limit = min(models.position_limit(made.arch) or length, length) if made.chained else length
    return DraftModel(there, raw, made.arch, words.compute(config.dtype, read_config(path)), None, limit, made)


def _differing(one: Path, other: Path) -> str | None:
    """A token whose id is another's in the other tokenizer, where both are there to be read."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if one == other or not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return None
    ours, theirs = map(_pieces, files)
    return next((repr(token) for i, token in ours.items() if theirs.get(i, token) != token), None)


def _pieces(file: Path) -> dict[int, str]:
    """Tokens by their ids, those added to the vocabulary aside; none where the file says them in no known way. Raises CheckpointError."""
    model = read_json(file).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return {i: token for token, i in vocab.items()}
    pieces = vocab if isinstance(vocab, list) else ()  # each with its score
    return {i: piece[0] for i, piece in enumerate(pieces) if isinstance(piece, list) and piece}
