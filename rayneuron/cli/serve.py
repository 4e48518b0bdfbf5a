"""serve: a model or a deployment file behind Ray Serve, until told to end."""

from __future__ import annotations

import argparse
import gc
import os
import threading
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("serve", help="check a model or deployment file and serve it with Ray Serve until SIGTERM or Ctrl-C")
    deployment.add(command)
    command.add_argument("--profile", default="plain", help="plain: Ray Serve's defaults; fast: HAProxy and throughput settings (plain)")
    command.add_argument("--grace", type=float, default=30.0, metavar="SECONDS", help="when told to end, streams have most of it (30)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    gc.set_threshold(100_000)  # what is imported from here on stays, and is not looked through for garbage again and again
    from rayneuron import preflight, settings
    from rayneuron.errors import ConfigError, NotReady
    from rayneuron.serve import port
    from rayneuron.serve.profile import ray_environment

    if not 0 <= args.grace < threading.TIMEOUT_MAX:
        raise ConfigError(f"--grace: must be a number of seconds, 0 or more, got {args.grace:g}")
    file = deployment.checked(args)
    environment = ray_environment(file.content, [*file.deployments.values(), *file.hosted.values()], args.profile)
    http = file.content.get("http_options") or {}
    port.check_free(http)
    port.check_certificate(http)
    cluster = settings.given("RAY_ADDRESS") or "local"
    here = cluster == "local"  # a Ray that starts here
    try:
        port.reach(cluster)
    except ConnectionError as problem:
        raise NotReady(f"RAY_ADDRESS: no Ray cluster answers at {cluster}: {problem}; unset it to have one started here") from None
    if here and args.profile == "fast":
        environment = port.haproxy_of_our_own(Path(f"/tmp/rn-{os.getuid()}-{http.get('port', 8000)}")) | environment
    preflight.ask_hubs(file)
    settings.export(environment)  # before Ray is imported, which reads them once
    from rayneuron.serve import fork_server, fresh

    alone = not isinstance(file.path, Path)
    own = alone and here  # for this alone
    forks = fork_server.begin(next(iter(file.deployments.values())).device) if own else None
    fresh.begin(file.deployments.values())
    from rayneuron.serve import process

    process.run(file.content, {**file.deployments, **file.gateways}, args.grace, alone, forks)
