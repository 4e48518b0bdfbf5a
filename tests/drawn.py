"""How many examples a property is tried with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(most: int, **more: Any) -> settings:
    """So many where slow tests run too (`-m ""`), else the share of them that tests/conftest.py says."""
    return settings(max_examples=most * settings.default.max_examples // 100, **more)  # type: ignore[union-attr]
