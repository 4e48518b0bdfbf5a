"""Vectors of texts: bytes to numbers, unit length, similarity. Plain arithmetic: a reply has a few, of some thousand numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from rayneuron.errors import RequestError


class Pooling(NamedTuple):
    """How a model's hidden states become one vector: of its last position or the `mean` of all, and whether of length 1."""

    kind: str = "last"
    normalize: bool = True


class Form(NamedTuple):
    """What a client wants of vectors: the first `dimensions` numbers (None: all), brought to length 1 or not."""

    dimensions: int | None = None
    normalize: bool = True

    def of(self, pooled: bytes) -> array[float]:
        """float32 [E] as the client wants it. Raises RequestError for more numbers than there are."""
        vector = array("f", pooled)
        if self.dimensions is not None and self.dimensions > len(vector):
            raise RequestError(f"dimensions must be at most {len(vector)}, got {self.dimensions}", param="dimensions")
        vector = vector[: self.dimensions]
        return unit(vector) if self.normalize else vector


def unit(vector: array[float]) -> array[float]:
    """The same direction with length 1; zeros stay zeros."""
    length = math.sqrt(dot(vector, vector))
    return array("f", [x / length for x in vector]) if length else vector


def dot(a: Iterable[float], b: Iterable[float]) -> float:
    """The sum of products."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def cosine(a: bytes, b: bytes) -> float:
    """Of two float32 [E]: the cosine of the angle between them."""
    return dot(Form().of(a), Form().of(b))
