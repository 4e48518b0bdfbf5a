"""The dialect of DJL LMI's rolling batch: `inputs` and `parameters`, json or jsonlines."""

from __future__ import annotations

from rayneuron.api.call import Dialect
from rayneuron.api.lmi.reply import error
from rayneuron.api.lmi.request import parse

INFERENCE = Dialect(parse, error)

__all__ = ["INFERENCE", "error"]
