"""What an hour of an instance type costs, as data: a list price changes, so that it carries its region and date, and can be said anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rayneuron.errors import ConfigError
from rayneuron.placement.instances import INSTANCES

REGION, DATE, UNCHECKED = "us-east-1", "2024-12", "not checked since: say --price"


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars an hour; `note`: whose price that is."""

    usd: float
    note: str = f"on demand, {REGION}, {DATE}, {UNCHECKED}"


# From memory of the public list, not fetched, and every report says so.
PRICES: Mapping[str, Price] = MappingProxyType(
    {
        "inf2.xlarge": Price(0.7582),
        "inf2.8xlarge": Price(1.9679),
        "inf2.24xlarge": Price(6.4906),
        "inf2.48xlarge": Price(12.9813),
        "trn1.2xlarge": Price(1.3438),
        "trn1.32xlarge": Price(21.50),
        "trn1n.32xlarge": Price(24.78),
        "trn2.48xlarge": Price(35.7608, f"a Capacity Block, us-east-2, 2025, {UNCHECKED}"),
    }
)


def priced(said: Sequence[str]) -> dict[str, Price]:
    """The list with what somebody says of it: TYPE=USD. Raises ConfigError."""
    found = dict(PRICES)
    for one in said:
        name, _, value = one.partition("=")
        if name not in INSTANCES:
            raise ConfigError(f"--price {one}: unknown instance {name!r}; write TYPE=USD of one of {', '.join(INSTANCES)}")
        try:
            usd = float(value)
        except ValueError:
            usd = 0.0
        if not 0 < usd < 1e6:
            raise ConfigError(f"--price {one}: write US dollars an hour: {name}=1.25")
        found[name] = Price(usd, "as said")
    return found
