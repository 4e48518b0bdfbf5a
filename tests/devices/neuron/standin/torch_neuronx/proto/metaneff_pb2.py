"""Stand-in: what a traced graph says of its inputs and outputs."""

from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    USER_INPUT = 0
    INPUT_WEIGHT = 1
    INPUT_STATE = 2


@dataclass
class MetaTensor:
    Type = Kind
    type: Kind
    checkpoint_key: bytes
    shape: tuple
    data_type: object


@dataclass
class MetaNeff:
    input_tensors: list
    output_aliases_to: dict = field(default_factory=dict)

    def SerializeToString(self):
        return repr(self).encode()
