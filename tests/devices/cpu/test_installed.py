"""Kernels that come with the package: built when it is, found without a compiler, and never taken for those of other sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from rayneuron.devices.cpu import library

ROOT = Path(__file__).resolve().parents[3]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
LOAD = """from rayneuron import devices
from rayneuron.devices.cpu import library
print(library.present() is library.library(), devices.built("cpu"))"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a checkout holds that an installation is made of."""
    tree = tmp_path / "tree"
    unwanted = shutil.ignore_patterns("__pycache__", f"{library.KERNELS}*")
    shutil.copytree(ROOT / "rayneuron", tree / "rayneuron", ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def run(tree: Path, program: str, *words: str, **environment: str) -> str:
    """What a Python program prints that finds the package of `tree` alone."""
    env = {**os.environ, "PYTHONPATH": str(tree), **environment}
    return subprocess.run([sys.executable, "-c", program, *words], cwd=tree, env=env, check=True, capture_output=True, text=True).stdout


def kernels(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*.so")]


def test_an_editable_install_finds_its_own_without_a_compiler_until_a_source_changes(tree: Path, tmp_path: Path) -> None:
    old = tree / "rayneuron" / "devices" / "cpu" / f"{library.KERNELS}of-an-older-source.so"
    old.touch()
    assert "the CPU kernels are in " in run(tree, BUILD, "build_editable", str(tmp_path))
    (made,) = kernels(tree)
    bare = {"PATH": str(tmp_path / "nothing"), "RAYNEURON_CACHE": str(tmp_path / "empty")}
    assert run(tree, LOAD, **bare).split() == ["True", made.removesuffix(".so")]
    with (tree / "rayneuron" / "devices" / "cpu" / "rows.cpp").open("a") as source:
        source.write("// another source\n")
    assert run(tree, LOAD, **bare).split() == ["True", "torch"], "both are None"


def test_a_wheel_brings_them_and_a_source_archive_does_not(tree: Path, tmp_path: Path) -> None:
    run(tree, BUILD, "build_wheel", str(tmp_path / "out"))
    (wheel,) = (tmp_path / "out").glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert not kernels(tree / "rayneuron") and len(kernels(site)) == 1
    bare = {"PATH": str(tmp_path / "nothing"), "RAYNEURON_CACHE": str(tmp_path / "empty")}
    assert run(site, LOAD, **bare).split() == ["True", kernels(site)[0].removesuffix(".so")]
    shutil.copy(site / "rayneuron" / "devices" / "cpu" / kernels(site)[0], tree / "rayneuron" / "devices" / "cpu")
    run(tree, BUILD, "build_sdist", str(tmp_path / "out"))
    with tarfile.open(next((tmp_path / "out").glob("*.tar.gz"))) as archive:
        names = [Path(name).name for name in archive.getnames()]
    assert {"setup.py", "matmul.cpp", "matmul.h"} <= set(names) and kernels(site)[0] not in names


def test_without_a_compiler_an_installation_goes_on(tree: Path, tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path / "nothing"), "RAYNEURON_CACHE": str(tmp_path / "empty")}
    said = run(tree, BUILD, "build_editable", str(tmp_path), **bare)
    assert "the CPU kernels are left to the first start (there is no C++ compiler; install g++)" in said
    assert not kernels(tree)
