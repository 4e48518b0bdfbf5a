"""Which Python files of the package every streamed chat request passes, from the ASGI call to its last event."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import rayneuron
from tests.serve.real import serving

ROOT = str(Path(rayneuron.__file__).parent) + "/"
# 25 before step times, drafts, pools, dialects, tools, adapters, beams came, each with rooms of its own; text.py and http.py are two files
MOST = 45


@contextmanager
def profiled(files: dict[str, set[str]]) -> Iterator[None]:
    """Gather the package's files that are called here and in threads begun within, with the functions of each."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            files.setdefault(code.co_filename.removeprefix(ROOT), set()).add(code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def test_a_streamed_chat_passes_few_files(tiny: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    files: dict[str, set[str]] = {}
    replies = []
    with profiled(files):
        async with serving(tiny) as served:
            for _ in range(6):  # what every one passes: some is done once, some once for a shape that drafts may have or not
                files.clear()
                status, reply = await served.post("/v1/chat/completions", json.dumps(body).encode())
                replies.append({path: sorted(names) for path, names in files.items()})
                await served.settle()
    passed = {path: names for path, names in replies[-1].items() if all(path in one for one in replies)}
    assert status == 200 and reply.count(b"data: ") >= 3 and reply.endswith(b"data: [DONE]\n\n")
    listed = "\n".join(f"{path}: {', '.join(passed[path])}" for path in sorted(passed))
    print(f"{len(passed)} files\n{listed}")
    assert {"serve/http.py", "engine/scheduler.py", "models/decoder.py"} <= passed.keys(), "both threads are seen"
    assert len(passed) <= MOST, listed
