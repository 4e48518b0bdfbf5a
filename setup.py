"""The package as pyproject.toml says, and in it the CPU kernels of the machine that builds it: no first start waits for a compiler.

They are found again by what they were made of and for; where that differs (another processor, an edited source) the first start builds
its own, and so a wheel runs anywhere. An isolated build has nothing but setuptools, and of this package what needs no more.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from rayneuron.devices.cpu import library  # noqa: E402


class WithKernels(build_py):
    """Modules, data and the kernels."""

    def run(self) -> None:
        """Copy them to where the wheel is made of, or leave them beside their sources."""
        super().run()
        root = ROOT if self.editable_mode else Path(self.build_lib)
        print(library.install(root / Path(library.__file__).parent.relative_to(ROOT)))


setup(cmdclass={"build_py": WithKernels})
