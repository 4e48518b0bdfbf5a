"""The stand-in for AWS's packages, put where imports find it for as long as a test asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayneuron import demo

STANDIN = Path(__file__).parent / "standin"
NAMES = ("torch_neuronx", "neuronx_distributed")


@pytest.fixture(scope="session")
def standin_modules() -> Iterator[dict[str, object]]:
    """Imported once a session: its operators can be registered only once."""
    sys.path.insert(0, str(STANDIN))
    import neuronx_distributed.trace.functions
    import neuronx_distributed.trace.hlo_utils
    import neuronx_distributed.trace.nxd_model.nxd_model  # noqa: F401
    import torch_neuronx.utils  # noqa: F401

    found = {name: module for name, module in sys.modules.items() if name.split(".")[0] in NAMES}
    sys.path.remove(str(STANDIN))
    for name in found:
        del sys.modules[name]
    yield found


@pytest.fixture(scope="session")
def wide() -> Path:
    """A random Llama of two layers with eight KV heads, for eight ranks."""
    return demo.random("tp8", dtype="fp32")


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache a session: a graph of one key is compiled by whoever asks for it first."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def standin(standin_modules: dict[str, object], compiled_once: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`device: neuron` works in this test, on eight cores of an Inf2."""
    for name, module in standin_modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    for name in ("RAYNEURON_EXPORTED", "RAYNEURON_RUNTIME"):
        monkeypatch.setenv(name, "")  # as in a process that has loaded nothing, before this test and after it
    monkeypatch.setenv("STANDIN_CORES", str(tmp_path / "cores"))
    monkeypatch.setenv("RAYNEURON_LEDGER", str(tmp_path / "ledger"))  # compilers of other tests are not waited for
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(compiled_once))
    return tmp_path


@pytest.fixture
def cold(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with an empty compile cache of the test's own, for what is said of compiling itself."""
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(standin / "cache"))
    return standin
