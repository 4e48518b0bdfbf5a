"""The child's side of child.py: one engine behind JSON lines on standard input and output (standard library only).

A peer is a function `run(prompts, new) -> steps`: generate exactly `new` tokens greedily for each prompt (token ids), ignoring EOS, and
return for every engine step that produced tokens when it ended (perf_counter seconds) and how many tokens each prompt has by then.
What measures something else returns its answer as a dictionary.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
Steps = list[tuple[float, list[int]]]
Run = Callable[..., "Steps | dict[str, float]"]


def answer(open_peer: Callable[[dict[str, Any]], Run]) -> None:
    """Open the peer with the settings of argv[1] (JSON), say how long that took, then answer {prompts, new} until standard input ends.

    An empty command asks for the seconds opening took.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even frozen, this process ends with the benchmark
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not land among the answers
    started = time.perf_counter()
    try:
        run = open_peer(json.loads(sys.argv[1]))
    except Exception as error:
        _say(channel, {"error": f"{type(error).__name__}: {error}"})
        raise
    loaded = {"load_s": time.perf_counter() - started}
    for line in sys.stdin:
        command = json.loads(line)
        if not command:
            _say(channel, loaded)
            continue
        try:
            began = time.perf_counter()
            made = run(**command)
            _say(channel, made if isinstance(made, dict) else {"steps": [(at - began, counts) for at, counts in made]})
        except Exception as error:
            traceback.print_exc()
            _say(channel, {"error": f"{type(error).__name__}: {error}"})


def _say(channel: Any, document: dict[str, Any]) -> None:
    channel.write(json.dumps(document) + "\n")
    channel.flush()
