"""Starting a replica: its CPU threads, its pace, and its progress as log lines and, in a terminal, a bar."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayneuron import devices, settings
from rayneuron.config import Deployment
from rayneuron.loading import Opened
from rayneuron.placement.layout import group_layout, rank_threads

log = logging.getLogger(__name__)

LINE_PERIOD_S = 2.0
PROXY_EVENTS_PER_S, HAPROXY_EVENTS_PER_S = 250.0, 500.0  # what leaves the engine nine tenths of two cores, or eight


class Startup:
    """Reports the stages of one replica's start. Called from the thread that loads."""

    def __init__(self, name: str, publish: Callable[[str], None]) -> None:
        self._name = name
        self._publish = publish
        self._stage = ""
        self._line_s = 0.0
        self._bar: Any = None
        self._started_s = time.monotonic()
        self._terminal = sys.stderr.isatty()
        log.info("%s: starting", name)

    def report(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` parts of a stage are ready."""
        now_s = time.monotonic()
        if stage != self._stage:
            self._close_bar()
            self._stage, self._line_s = stage, 0.0
        if self._terminal:
            self._draw(stage, done, total)
        if done >= total or now_s - self._line_s >= LINE_PERIOD_S:
            self._line_s = now_s
            progress = f"{stage} {done}/{total}, {now_s - self._started_s:.1f} s since start"
            log.info("%s: %s", self._name, progress)
            self._publish(progress)

    def done(self, seconds: Mapping[str, float]) -> None:
        """The first token is possible from now on."""
        self._close_bar()
        parts = ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
        log.info("%s: ready after %.1f s (%s)", self._name, time.monotonic() - self._started_s, parts)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=f"{self._name}: {stage}", leave=False)
        self._bar.update(done - self._bar.n)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


async def opened_aside(work: Callable[[], Opened]) -> Opened:
    """Load on a thread. Where nobody waits for it any more, what it has made is given back."""
    made: list[Opened] = []
    left = threading.Event()

    def load() -> None:
        made.append(work())
        if left.is_set():
            _close(made)

    try:
        await asyncio.to_thread(load)
    except asyncio.CancelledError:
        left.set()
        _close(made)
        raise
    return made[0]


def _close(made: list[Opened]) -> None:
    with contextlib.suppress(IndexError):  # whoever comes second finds nothing
        made.pop().engine.close()


def events_per_s(config: Deployment) -> float:
    """Most stream events a second: `serving.stream_events_per_s`, else what the HTTP proxy in front can be asked to carry."""
    return config.serving.stream_events_per_s or (HAPROXY_EVENTS_PER_S if settings.behind_haproxy() else PROXY_EVENTS_PER_S)


def thread_share(config: Deployment) -> int:
    """CPU threads of a rank, of all the CPUs this process may use: Ray's OMP_NUM_THREADS=1 in small actors is not our limit."""
    return rank_threads(config, group_layout(config, devices.ranks_per_process(config.device)), len(os.sched_getaffinity(0)))
