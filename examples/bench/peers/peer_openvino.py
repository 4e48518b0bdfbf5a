"""OpenVINO GenAI's continuous batching; the checkpoint is exported once by optimum-intel, into `bench-openvino-DTYPE` beside it.

bf16: weights stored in half precision, computed in bf16. int8: weights of a byte a number. One way of settings serves every case:
what was tried and was slower is in README.md.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from answer import Run, Steps, answer

WEIGHTS = {"bf16": "fp16", "int8": "int8", "fp32": "fp32"}


def exported(path: Path, dtype: str) -> Path:
    """The folder of the exported model, made on first use."""
    target = path / f"bench-openvino-{dtype}"
    if not target.exists():
        draft = path / f"bench-openvino-{dtype}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(path)]
        command += ["--task", "text-generation-with-past", "--weight-format", WEIGHTS[dtype], str(draft)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        draft.rename(target)
    return target


def open_peer(settings: dict[str, Any]) -> Run:
    """settings: model, dtype, threads, rows, length."""
    schedule = genai.SchedulerConfig()
    schedule.cache_size = 2  # GiB
    schedule.max_num_seqs = settings["rows"]
    schedule.max_num_batched_tokens = settings.get("batched", 2048)
    schedule.enable_prefix_caching = False
    schedule.dynamic_split_fuse = True
    wanted = {
        "INFERENCE_PRECISION_HINT": "f32" if settings["dtype"] == "fp32" else "bf16",
        "INFERENCE_NUM_THREADS": settings["threads"],
        "PERFORMANCE_HINT": settings.get("hint", "LATENCY"),
        "NUM_STREAMS": 1,
    }
    pipeline = genai.ContinuousBatchingPipeline(str(exported(Path(settings["model"]), settings["dtype"])), schedule, "CPU", wanted)
    made = 0

    def run(prompts: list[list[int]], new: int) -> Steps:
        nonlocal made
        params = genai.GenerationConfig()
        params.max_new_tokens, params.ignore_eos, params.do_sample = new, True, False
        handles = []
        for prompt in prompts:
            handles.append(pipeline.add_request(made, ov.Tensor(np.array([prompt], dtype=np.int64)), params))
            made += 1
        counts = [0] * len(prompts)
        steps: Steps = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in enumerate(handles):
                while handle.can_read():
                    counts[row] += sum(len(output.generated_ids) for output in handle.read().values())
            steps.append((time.perf_counter(), counts.copy()))
        return [step for step in steps if any(step[1])]

    return run


if __name__ == "__main__":
    answer(open_peer)
