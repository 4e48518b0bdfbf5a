"""What fits on a host together, compared with every way to lay it out; and what is refused, with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron import gateway_config
from rayneuron.errors import ConfigError
from rayneuron.placement import hosting
from rayneuron.placement.hosting import HostedSize
from rayneuron.placement.instances import instance


def anyhow(sizes: Sequence[int], free: frozenset[int], total: int) -> bool:
    """Whether some way of laying them out is there."""
    if not sizes:
        return True
    starts = [s for s in range(0, total - sizes[0] + 1, sizes[0]) if set(range(s, s + sizes[0])) <= free]
    return any(anyhow(sizes[1:], free - set(range(s, s + sizes[0])), total) for s in starts)


@given(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=5))
def test_what_fits_at_once(sizes: list[int]) -> None:
    kind = instance("cores:12")
    laid = hosting.together(sizes, kind, 1)
    assert (laid is not None) == anyhow(sizes, frozenset(range(12)), 12)
    taken = [set(range(first, first + size)) for size, (_, first) in zip(sizes, laid or (), strict=False)]
    assert sum(map(len, taken)) == len(set().union(*taken))


def gateway(*models: tuple[str, int, dict[str, Any]], kind: str = "inf2.48xlarge", **args: Any) -> gateway_config.GatewayConfig:
    listed = [
        {"name": name, "args": {"model": {"path": "/m"}, "tensor_parallel": size, **args}, **more} for name, size, more in models
    ]
    return gateway_config.parse({"models": listed, "host": {"instance": kind}})


def test_what_plan_shows() -> None:
    made = gateway(("large", 12, {}), ("chat", 8, {"pinned": True}), ("small", 4, {}))
    lines = list(hosting.describe(made))
    assert lines[0] == "host: 1 x inf2.48xlarge, 24 cores for 3 models that may sleep:"
    assert lines[2] == "  chat: 8 cores a seat, always 1; 3 places"
    assert lines[4:] == ["awake at the same time:", "  large + chat + small: 24 of 24 cores"]
    lines = list(hosting.describe(gateway(("whole", 24, {}), ("chat", 8, {}))))
    assert lines[-2:] == ["  whole: 24 of 24 cores; chat asleep", "  chat: 8 of 24 cores; whole asleep"]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"m": HostedSize(16)}, r"m, a model of the host: tensor_parallel 16 is not possible on inf2\.48xlarge.*write tensor_parallel: 12"),
        ({"a": HostedSize(24, 1), "b": HostedSize(8, 1)}, r"want 24 \(a\) \+ 8 \(b\) = 32 cores of the 24 of 1 x inf2\.48xlarge; unpin"),
        ({"a": HostedSize(8, 1), "b": HostedSize(12, 1), "c": HostedSize(4, 2)}, r"8 \(a\) \+ 12 \(b\) \+ 4 \(c\) \+ 4 \(c\) = 28"),
    ],
)
def test_what_never_fits_is_refused(models: dict[str, HostedSize], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hosting.check("inf2.48xlarge", 1, models)


@pytest.mark.parametrize(
    ("args", "more", "said"),
    [
        ({"device": "neuron"}, {}, r"m, a model of the host: it may sleep, and would compile for minutes.*compile\.required: true"),
        ({"instance": "inf2.xlarge"}, {}, "instance inf2.xlarge is not the host's; write inf2.48xlarge"),
        ({"nodes": 2}, {}, "nodes is for models with an application of their own"),
        ({"pipeline_parallel": 2}, {}, "pipeline_parallel is for models"),
        ({"pools": {}}, {}, "pools is for models"),
        ({"serving": {"num_replicas": 2}}, {}, "num_replicas is the host's to decide; write min and max"),
        ({"serving": {"seat": {"node": "x", "cores": [0], "owner": "g"}}}, {}, "seat is the host's to write"),
        ({"max_num_seq": 2}, {}, "did you mean max_num_seqs"),
        ({}, {"min": 3, "max": 2}, "min 3 and max 2 must not descend"),
    ],
)
def test_what_a_model_of_a_host_may_not_say(args: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made = gateway(("m", 8, more), **args)
        gateway_config.check(made, {}, {})
    if args == {"device": "neuron"}:
        made = gateway(("m", 8, {"pinned": True}), **args)
        gateway_config.check(made, {}, {})
        made = gateway(("m", 8, {}), compile={"required": True}, **args)
        gateway_config.check(made, {}, {})
