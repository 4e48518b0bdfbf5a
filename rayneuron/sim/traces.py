"""Traces as they are published: Azure's, Mooncake's and Vidur's files as requests; what is wrong in one is said with its line."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from math import isfinite
from operator import itemgetter
from pathlib import Path, PurePath
from random import Random
from typing import BinaryIO, cast

from rayneuron.errors import ConfigError
from rayneuron.sim.workload import OWN, Arrival, gap_s

_MOONCAKE = 512  # tokens of a block of that trace
_WHEN = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_VIDUR = ("num_prefill_tokens", "num_decode_tokens")

_Row = tuple[float | None, int, int, tuple[tuple[int, int], ...]]  # seconds, prompt, output, parts


def read(path: Path, scale: float = 1.0, repeat: int = 1, rate: float = 1.0, seed: int = 0, burstiness: float = 1.0) -> Iterator[Arrival]:
    """A trace file: Azure's (.csv: TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's (.jsonl) or Vidur's (.csv: num_prefill_tokens,
    num_decode_tokens), which has no times: they come at random, `rate` a second; .gz behind the name: packed by gzip. The first request
    of a trace with times comes at 0. `scale`: so many times as fast as the trace has it; `repeat`: so many times over, one after another.

    Raises ConfigError for a file or a line of it that is none.
    """
    number, behind_s, random, kept = 0, 0.0, Random(seed), list[_Row]()
    for again in range(repeat):
        last_s = 0.0
        for row in kept if again else _lines(path):
            at_s, prompt, output, parts = row
            if not again and repeat > 1:
                kept.append(row)
            last_s = last_s + gap_s(rate, burstiness, random) if at_s is None else at_s / scale
            own = prompt + output - sum([tokens for _, tokens in parts])
            yield Arrival(number, behind_s + last_s, prompt, output, parts=(*parts, (OWN + number, own)), own=own)
            number += 1
        behind_s += last_s


def timed(path: Path) -> bool:
    """Whether a trace says when its requests come. Raises ConfigError for one that cannot be read."""
    return next(iter(_lines(path)), (0.0,))[0] is not None


class _Numbered:
    """Of a file, as text; `number`: of the one that was read last."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.number = file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line.decode("utf-8-sig" if self.number == 1 else "utf-8")


def _lines(path: Path) -> Iterator[_Row]:
    name = path.name.lower()
    kind = {".csv": _table, ".jsonl": _mooncake}.get(PurePath(name.removesuffix(".gz")).suffix)
    if kind is None:
        raise ConfigError(f"{path}: a trace is a .csv as Azure's or Vidur's, or a .jsonl as Mooncake's; either may be packed: .gz")
    with cast(BinaryIO, gzip.open(path) if name.endswith(".gz") else path.open("rb")) as file:
        lines = _Numbered(file)
        first_s = before_s = None
        try:
            for at_s, prompt, output, parts in kind(lines):
                if at_s is not None:
                    first_s = at_s if first_s is None else first_s
                    if before_s is not None and at_s < before_s:
                        raise ValueError("it came before the one on the line above; sort the lines by time")
                    before_s, at_s = at_s, at_s - first_s
                yield at_s, prompt, output, parts
        except (ValueError, csv.Error, RecursionError) as wrong:
            said = f"it is no UTF-8 text: {wrong.reason}" if isinstance(wrong, UnicodeDecodeError) else str(wrong)
            raise ConfigError(f"{path}, line {max(1, lines.number)}: {said}") from wrong
        except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
            raise ConfigError(f"{path}, behind line {lines.number}: it is not what gzip packs, or not all of it: {wrong}") from wrong


def _table(lines: _Numbered) -> Iterator[_Row]:
    rows = csv.reader(lines)
    names = next(rows, None)
    if names is None:
        raise ValueError(f"it is empty; the first line says {','.join(_AZURE)} or {','.join(_VIDUR)}")
    wanted = _VIDUR if _VIDUR[0] in names else _AZURE
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"there is no column {missing[0]}; the first line says {','.join(_AZURE)} or {','.join(_VIDUR)}")
    return _requests(rows, itemgetter(*map(names.index, wanted)), wanted, len(names))


def _requests(rows: Iterator[list[str]], pick: Callable[[list[str]], tuple[str, ...]], names: tuple[str, ...], wide: int) -> Iterator[_Row]:
    for row in rows:
        if not row:
            continue
        if len(row) != wide:
            raise ValueError(f"it has {len(row)} columns, the first line {wide}")
        *when, prompt, output = pick(row)
        yield _seconds(when[0]) if when else None, _tokens(prompt, names[-2]), _tokens(output, names[-1]), ()


def _mooncake(lines: _Numbered) -> Iterator[_Row]:
    for line in lines:
        if line.isspace():
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("it is no JSON object")
        if missing := [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in row]:
            raise ValueError(f"there is no {missing[0]}")
        when, numbers, prompt = row["timestamp"], row["hash_ids"], _tokens(row["input_length"], "input_length")
        if isinstance(when, bool) or not isinstance(when, int | float) or not isfinite(when):
            raise ValueError(f"timestamp {when!r} is no number of milliseconds")
        if not isinstance(numbers, list) or any([type(number) is not int or not 0 <= number < OWN for number in numbers]):
            raise ValueError(f"hash_ids are no list of whole numbers of 0 to {OWN - 1}")
        parts = tuple([(n, _MOONCAKE) for n in numbers[: prompt // _MOONCAKE]])
        yield when / 1e3, prompt, _tokens(row["output_length"], "output_length"), parts


def _seconds(said: str) -> float:
    """A date and time, or a number of seconds."""
    found = _WHEN.fullmatch(said)
    try:
        if found is None:
            when = float(said)
        else:
            zone = (found[3] or "Z").replace("Z", "+00:00")
            when = datetime.fromisoformat(found[1] + zone).timestamp() + float(found[2] or 0)
    except ValueError:
        when = float("nan")
    if not isfinite(when):
        raise ValueError(f"TIMESTAMP {said!r} is neither a date and time (2023-11-16 18:15:46.68) nor a number of seconds")
    return when


def _tokens(said: object, name: str) -> int:
    try:
        number = float("nan") if isinstance(said, bool) else float(said)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not (number >= 1 and number.is_integer()):
        raise ValueError(f"{name} {said!r} is no whole number of 1 or more")
    return int(number)
