"""Makes `tests.parallel.owners` importable by name, here and in the processes the tests start, however pytest itself was started."""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)
