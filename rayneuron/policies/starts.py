"""How long a model takes to start, from what its parts took before; what nobody has measured is guessed from bytes."""

from __future__ import annotations

from collections.abc import Mapping

_SHARE = 0.3  # of a new measurement
_READ = 1e9  # bytes a second of a disk nobody has measured
_BESIDE_S = 10.0  # a start beside its weights, where nobody has measured one
WEIGHTS = "weights"


def learned(known: Mapping[str, float], parts: Mapping[str, float]) -> dict[str, float]:
    """What is known of the parts of a model's start, after one more."""
    return {part: known[part] + _SHARE * (took - known[part]) if part in known else took for part, took in parts.items()}


def expected_s(known: Mapping[str, float], weight_bytes: int, resident: float = 0.0, resident_before: float = 0.0) -> float:
    """What the next start takes. `resident`: the part of its weights that is in memory, and that was at the starts that are `known`."""
    if not known:
        return weight_bytes / _READ * (1.0 - 0.9 * resident) + _BESIDE_S
    # Memory is read ten times as fast as a disk.
    scale = (1.0 - 0.9 * resident) / (1.0 - 0.9 * resident_before)
    return sum(took * (scale if part == WEIGHTS else 1.0) for part, took in known.items())
