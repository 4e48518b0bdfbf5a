"""Makes `tests.serve.scripted` importable by name, here and in Ray's workers, and serves it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))

from tests.serve.scripted import PATIENCE_S, Site, site  # noqa: E402


@pytest.fixture(scope="module")
def scripted_site(tiny: Path) -> Iterator[Site]:
    """The scripted model with the default limits, unpaced."""
    with site(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def client(scripted_site: Site) -> Iterator[httpx.Client]:
    """Somebody who asks it."""
    with httpx.Client(base_url=scripted_site.url, timeout=PATIENCE_S) as http:
        yield http
