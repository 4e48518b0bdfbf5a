#!/usr/bin/env python3
"""The least Ray Serve there is: Ray, Serve and an application that answers 200. What a start cannot be faster than."""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
from ray import serve


@serve.deployment
class Nothing:
    """Answers whatever it is asked."""

    async def __call__(self, request: Any) -> str:
        return ""


def main() -> None:
    """Serve at the port of the command line until ended."""
    began = time.perf_counter()
    ray.init(namespace="serve")
    print(f"ray.init took {time.perf_counter() - began:.2f} s", flush=True)
    began = time.perf_counter()
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print(f"serve.start took {time.perf_counter() - began:.2f} s", flush=True)
    serve.run(Nothing.bind(), blocking=True)


if __name__ == "__main__":
    main()
