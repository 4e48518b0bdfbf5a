"""The tokenizer of a model directory: ids are those of tokenizer.json, names and templates those of the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rayneuron.errors import CheckpointError
from rayneuron.text.detokenizer import byte_alphabet, steps_of

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # tokenizer_class of a tokenizer that brings no tokens of its own
OTHER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
SHRINK = {"Prepend": 1, "NFC": 4}  # how many characters a normaliser may make one of
KEEPING = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split")  # pre-tokenizers that drop nothing


class Tokenizer(NamedTuple):
    """`backend`: a `tokenizers.Tokenizer`. `names`: bos_token, ... as texts, where there are any. `templates`: one, or several by name."""

    backend: Any
    names: dict[str, str]
    templates: str | dict[str, str] | None

    def id_of(self, name: str) -> int | None:
        """The id of a named token."""
        token = self.names.get(name)
        return None if token is None else self.backend.token_to_id(token)


def open_tokenizer(path: Path) -> Tokenizer:
    """Read it, never from the network. CheckpointError where there is none or it is damaged.

    What tokenizer.json says counts, whatever `tokenizer_class`, `model_type` or `add_bos_token` say beside it: a model was trained with
    what the file does. (transformers 5 too passes over `add_bos_token` and `add_eos_token` where there is a tokenizer.json.) Tokens that
    the files beside it name and it does not hold are added to it. Only a directory without a tokenizer.json needs transformers.
    """
    find(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        return _converted(path)
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as wrong:  # the library raises bare Exception
        raise CheckpointError(f"no tokenizer could be read from {file}: {wrong}") from wrong
    backend.no_truncation()  # a saved tokenizer may carry the truncation and padding of its training
    backend.no_padding()
    config = read_json(path / "tokenizer_config.json")
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    try:
        names = _names(path, config, backend)
        _add(backend, path, config, names)
    except (TypeError, ValueError, AttributeError, LookupError) as wrong:
        raise CheckpointError(f"the tokens named beside {file} cannot be read ({wrong!r}); take them from the model again") from wrong
    return Tokenizer(backend, names, read_templates(path, config))


def find(path: Path) -> None:
    """Raise CheckpointError where a directory holds no tokenizer at all."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory that holds tokenizer.json")
    if not any((path / name).is_file() for name in ("tokenizer.json", *OTHER_FILES)):
        raise CheckpointError(
            f"no tokenizer could be read from {path}: it holds no tokenizer.json; copy the model's own there, name its directory in"
            " model.tokenizer, or set model.skip_tokenizer_init: true to work with token ids alone"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{path} is not valid JSON: {wrong}") from wrong
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_templates(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Chat templates where transformers looks for them: files of their own, else tokenizer_config.json (one text, or a list by name)."""
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    try:
        found = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except (OSError, UnicodeError) as wrong:
        raise CheckpointError(f"a chat template of {path} cannot be read: {wrong}") from wrong
    given = found or config.get("chat_template")
    if isinstance(given, list):
        try:
            given = {str(each["name"]): str(each["template"]) for each in given}
        except (KeyError, TypeError) as wrong:
            said = f"{path / 'tokenizer_config.json'}: chat_template must be a text or a list of {{name, template}}"
            raise CheckpointError(said) from wrong
    if isinstance(given, dict):
        return given["default"] if list(given) == ["default"] else given or None
    return given if isinstance(given, str) else None


class Bound(NamedTuple):
    """How much of a text one token can stand for: `most` characters. `dropped`: bytes the vocabulary lacks, which get no token."""

    most: int
    dropped: bytes = b""

    def exceeded(self, text: str, limit: int) -> bool:
        """True where a text has more than `limit` tokens for sure."""
        if len(text) <= self.most * limit:
            return False
        kept = text.encode("utf-8", "surrogatepass").translate(None, self.dropped) if self.dropped else text
        return len(kept) > self.most * limit


def bound_of(backend: Any) -> Bound | None:
    """The bound of a tokenizer; None where it has none (words it does not know, spaces it drops)."""
    model, vocab = backend.model, backend.get_vocab()
    splits, shapes = steps_of(backend.pre_tokenizer, "pretokenizers"), steps_of(backend.normalizer, "normalizers")
    spelled = any(step["type"] == "ByteLevel" for step in splits)
    fallen = getattr(model, "byte_fallback", False) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if type(model).__name__ != "BPE" or not (spelled or fallen):
        return None
    if any(step["type"] not in KEEPING or step.get("behavior") == "Removed" for step in splits):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # they take all the space beside them
    most = max(map(len, vocab))
    for step in shapes:
        longer = step["type"] == "Replace" and len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
        if not longer and step["type"] not in SHRINK:
            return None
        most *= SHRINK.get(step["type"], 1)
    return Bound(most, bytes(byte for char, byte in byte_alphabet().items() if char not in vocab) if spelled else b"")


def _names(path: Path, config: Mapping[str, Any], backend: Any) -> dict[str, str]:
    """Named tokens of tokenizer_config.json and, where that lists no added tokens, special_tokens_map.json, as transformers reads them.

    Where neither speaks of one and the class is not generic, the ids of config.json stand for the tokens the class would bring along.
    """
    given = {name: config[name] for name in NAMED_TOKENS if name in config}
    if "added_tokens_decoder" not in config:
        older = read_json(path / "special_tokens_map.json")
        given |= {name: older[name] for name in NAMED_TOKENS if name in older}
    if config.get("tokenizer_class") not in GENERIC:
        ids = read_json(path / "generation_config.json") | read_json(path / "config.json")
        for name in NAMED_TOKENS:
            token_id = ids.get(f"{name}_id")
            if name not in given and type(token_id) is int and token_id >= 0:
                given[name] = backend.id_to_token(token_id)
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in given.items()}
    return {name: token for name, token in texts.items() if isinstance(token, str) and token}


def _add(backend: Any, path: Path, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Give the tokenizer what the files beside it name and it does not hold, as far as the model has rows for more."""
    import tokenizers

    listed = config.get("added_tokens_decoder") or {}
    tokens: list[Any] = [listed[key] for key in sorted(listed, key=int)] if isinstance(listed, dict) else []
    if not listed:
        older = read_json(path / "added_tokens.json")
        tokens += [{"content": token, "special": token in names.values()} for token in sorted(older, key=older.__getitem__)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    tokens += [*[config.get(name) if isinstance(config.get(name), dict) else names[name] for name in names], *extra]
    held = {token.content for token in backend.get_added_tokens_decoder().values()}
    rows = vocab_size(read_json(path / "config.json"))
    for token in tokens:
        flags = {"special": True} if isinstance(token, str) else {k: v for k, v in token.items() if k not in ("content", "__type")}
        content = token if isinstance(token, str) else token["content"]
        new = backend.token_to_id(content) is None
        if content in held or (new and rows and backend.get_vocab_size() >= rows):
            continue
        flags.setdefault("special", content in names.values())
        backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        held.add(content)


def vocab_size(config: Mapping[str, Any]) -> int:
    """The rows of a model's embedding as its config.json says; 0 where it does not."""
    nested = config.get("text_config")
    size = config.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) else 0


def special_ids(backend: Any) -> frozenset[int]:
    """Ids that are no text. A Unigram vocabulary may hold a token twice, and the library tells special ones by their name."""
    found = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    if type(backend.model).__name__ != "Unigram":
        return frozenset(found)
    names, rows = set(found.values()), range(backend.get_vocab_size())
    return frozenset(found) | {token_id for token_id in rows if backend.id_to_token(token_id) in names}


def eos_ids(path: Path) -> frozenset[int]:
    """Every id config.json and generation_config.json call the end of a sequence."""
    found: set[int] = set()
    for config in (read_json(path / "config.json"), read_json(path / "generation_config.json")):
        nested = config.get("text_config")
        found |= _ids(config.get("eos_token_id")) | (_ids(nested.get("eos_token_id")) if isinstance(nested, dict) else set())
    return frozenset(found)


def _ids(value: object) -> set[int]:
    """An eos_token_id as configs write it: an id, a list of ids, or nothing."""
    items = value if isinstance(value, list) else [value]
    return {item for item in items if type(item) is int}


def _converted(path: Path) -> Tokenizer:
    """A tokenizer of another kind of file (SentencePiece, vocab.json and merges.txt, ...), as transformers converts it."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as wrong:  # transformers raises whatever the file at fault made it trip over
        raise CheckpointError(f"no tokenizer could be read from {path}: {wrong}") from wrong
    names = {name: str(token) for name, token in theirs.special_tokens_map.items() if name in NAMED_TOKENS}
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None:
        return Tokenizer(_Slow(theirs), names, theirs.chat_template)
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, names, theirs.chat_template)


class _Encoding(list[int]):
    @property
    def ids(self) -> list[int]:
        return list(self)


class _Slow:
    """A tokenizer of transformers that is not built on the tokenizers library, with that library's verbs."""

    model = pre_tokenizer = normalizer = decoder = None

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        return [_Encoding(self._theirs.encode(text, add_special_tokens=add_special_tokens, verbose=False)) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        whole: str = self._theirs.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return whole

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._theirs.get_vocab()
        return vocab

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self._theirs.added_tokens_decoder
        return added

    def token_to_id(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def id_to_token(self, token_id: int) -> str | None:
        token: str | None = self._theirs.convert_ids_to_tokens(token_id)
        return token
