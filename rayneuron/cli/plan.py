"""plan: where every worker of a deployment goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser(
        "plan", help="print cores, memory and environment of every worker, without a cluster", conflict_handler="resolve"
    )
    deployment.add(command)
    command.add_argument("--instance", metavar="TYPE", help="plan for this instance type: inf2.48xlarge")
    command.add_argument("--nodes", type=int, metavar="N", help="over so many instances (as many as the largest group spans)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import devices, settings, sources
    from rayneuron.errors import ConfigError
    from rayneuron.placement import hosting
    from rayneuron.placement.listing import describe

    if args.nodes is not None and args.nodes < 1:
        raise ConfigError(f"--nodes: must be at least 1, got {args.nodes}")
    file = deployment.read(args)
    where = {"named": args.instance, "nodes": args.nodes, "vcpus": os.cpu_count() or 1}
    visible = settings.given("NEURON_RT_VISIBLE_CORES")
    def words(source: str) -> Path:
        return sources.resolve(source, weights=False).path

    if file.deployments:
        print(describe(file.pools, **where, ranks_per_process=devices.ranks_per_process, resolve=words, visible=visible))
    for name, one in file.hosted.items():
        where["named"] = one.instance
        print(describe({name: one}, **where, ranks_per_process=devices.ranks_per_process, resolve=words, visible=visible))
    for name, gateway in file.gateways.items():
        for line in hosting.describe(gateway) if gateway.host is not None else ():
            print(line)
        models = ", ".join(listed.title for listed in gateway.models)
        print(f"gateway {name}: {gateway.serving.replicas} of {gateway.serving.num_cpus:g} CPUs, before {models}")
