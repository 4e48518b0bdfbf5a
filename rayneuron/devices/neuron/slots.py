"""How many compilers run on a machine at once, whoever starts them: models side by side would each take all of its memory for their own.

A slot is a file that is locked while a compiler runs; the kernel frees it with its process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rayneuron.errors import ConfigError

_PAUSE_S = 0.2


@contextmanager
def slot(folder: Path, most: int, check: Callable[[], None]) -> Iterator[int]:
    """Run inside with one of `most` slots of this machine, by number; waits for one, and `check`, called meanwhile, may raise.

    Raises ConfigError where the folder cannot be written.
    """
    while (found := _locked(folder, most)) is None:
        check()
        time.sleep(_PAUSE_S)
    number, descriptor = found
    try:
        yield number
    finally:
        os.close(descriptor)


def _locked(folder: Path, most: int) -> tuple[int, int] | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(most):
            descriptor = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number, descriptor
            except BlockingIOError:
                os.close(descriptor)
    except OSError as problem:
        said = f"compilers are counted in {folder}, which cannot be written ({problem.strerror}); name another with RAYNEURON_LEDGER"
        raise ConfigError(said) from None
    return None
