"""Stand-in: weight layout optimisation, which transposes some weights once for all graphs."""

import json
from pathlib import Path


def mark_weights_for_wlo(trace_artifacts, weights_to_skip_layout_optimization=None):
    invalid = set(weights_to_skip_layout_optimization or ()) - set(trace_artifacts.weight_name_to_idx)
    if invalid:
        raise RuntimeError(f"Weight layout optimization marking failed: Invalid weights in skip set: {invalid}")
    trace_artifacts.hlo.change(marked=True)


def apply_layout_transformation(trace_artifacts, priority_model_trace_artifacts, wlo_artifacts, key=None):
    try:
        if not trace_artifacts.hlo:
            raise ValueError("HLO module is None")
        if not trace_artifacts.weight_name_to_idx:
            raise ValueError("Weight name to index mapping is empty")
        if not wlo_artifacts:
            raise ValueError("WLO artifacts is missing")
        if wlo_artifacts.wrapped_neff_hlo_filepath is None:
            return
        names = json.loads(Path(wlo_artifacts.wrapped_neff_hlo_filepath).read_text())
        trace_artifacts.hlo.change(turned=frozenset(names) & set(trace_artifacts.weight_name_to_idx))
    except Exception as e:
        raise RuntimeError(f"Weight layout transformation failed for {key}: {e}") from e
