"""Reading between measured points: bilinear, against numpy's own interpolation along each axis."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.policies.step_times import Grid

AXES = st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True).map(sorted)


@given(AXES, AXES, st.integers(0, 5000), st.integers(0, 5000), st.randoms(use_true_random=False))
def test_between_points_as_numpy_does_along_each_axis(xs, ys, x, y, draw):
    points = [(a, b, draw.uniform(0.1, 900.0)) for a in xs for b in ys]
    grid = Grid(draw.sample(points, len(points)))
    assert sorted(grid.points()) == sorted(points)
    lines = [np.interp(y, ys, [ms for a, _, ms in points if a == at]) for at in xs]
    assert np.isclose(grid.at(x, y), np.interp(x, xs, lines), rtol=1e-9)
    assert np.isclose(sum(share for _, share in grid.shares(x, y)), 1.0) and all(share > 0 for _, share in grid.shares(x, y))
