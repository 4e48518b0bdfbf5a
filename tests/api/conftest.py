"""Makes `tests.api.spelling` importable by name, and builds its tokenizers once a session."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from rayneuron.text.text import Text  # noqa: E402
from tests.api import spelling  # noqa: E402


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """GPT-2's kind: every byte has a token."""
    return Text(spelling.byte_level(tmp_path_factory.mktemp("byte-level")))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Llama's kind: `▁` for a space, bytes only for characters without a token, one space stripped at the start."""
    return Text(spelling.byte_fallback(tmp_path_factory.mktemp("byte-fallback")))


@pytest.fixture(scope="session")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """BERT's kind, which has no table of bytes: decoded through a window."""
    return Text(spelling.word_pieces(tmp_path_factory.mktemp("word-pieces")))


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def text(request: pytest.FixtureRequest) -> Text:
    """Both kinds in turn."""
    found: Text = request.getfixturevalue(request.param)
    return found
