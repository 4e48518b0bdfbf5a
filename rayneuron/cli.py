"""The command line: demo models, checking and serving a deployment file, generating offline."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayneuron.errors import RayNeuronError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 with one line on standard error that says what is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except RayNeuronError as error:
        print(f"rayneuron {args.command}: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has seen enough; the interpreter would complain about it once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rayneuron", description="Large language models on AWS Neuron behind Ray Serve.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        *(_add_demo_model, _add_config, _add_plan, _add_compile, _add_serve, _add_generate, _add_shard, _add_quantize),
        *(_add_doctor, _add_version),
    ):
        add(commands)
    return parser


def _add_demo_model(commands: Any) -> None:
    command = commands.add_parser("demo-model", help="write the demo model, or a random one, and print its directory")
    command.add_argument("--random", metavar="SIZE", help="a Llama with random weights: tiny, tp8, tp128, 160m, 0.5b or 1b")
    command.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    command.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (bf16)")
    command.add_argument("--out", type=Path, metavar="DIR", help="write there instead of the cache")
    command.set_defaults(run=_demo_model)


def _demo_model(args: argparse.Namespace) -> None:
    from rayneuron import demo

    if args.random is None:
        print(demo.ensure(dtype=args.dtype, out=args.out))
    else:
        print(demo.random(args.random, seed=args.seed, dtype=args.dtype, out=args.out))


def _add_deployment(command: argparse.ArgumentParser) -> None:
    command.add_argument("deployment", type=Path, metavar="DEPLOYMENT.yaml")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the args: model.path=/models/x"
    )
    command.add_argument("--application", metavar="NAME", help="which application --set means, where the file has several; or all")


def _add_config(commands: Any) -> None:
    command = commands.add_parser("config", help="check a deployment file and print it with every default filled in")
    _add_deployment(command)
    command.set_defaults(run=_config)


def _config(args: argparse.Namespace) -> None:
    import yaml

    from rayneuron import deployment_file

    file = deployment_file.read(args.deployment, deployment_file.parse_assignments(args.set), args.application)
    print(yaml.safe_dump({name: deployment.model_dump() for name, deployment in file.deployments.items()}, sort_keys=False), end="")


def _add_plan(commands: Any) -> None:
    command = commands.add_parser("plan", help="print cores, memory and environment of every worker, without a cluster")
    _add_deployment(command)
    command.add_argument("--instance", metavar="TYPE", help="plan for this instance type: inf2.48xlarge")
    command.add_argument("--nodes", type=int, metavar="N", help="over so many instances (as many as the largest group spans)")
    command.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> None:
    from rayneuron import demo, deployment_file, devices
    from rayneuron.placement.listing import describe

    file = deployment_file.read(args.deployment, deployment_file.parse_assignments(args.set), args.application)
    print(
        describe(
            file.deployments,
            named=args.instance,
            nodes=args.nodes,
            vcpus=os.cpu_count() or 1,
            ranks_per_process=devices.ranks_per_process,
            resolve=demo.resolve,
        )
    )


def _add_serve(commands: Any) -> None:
    command = commands.add_parser("serve", help="check a deployment file, then `serve run` it")
    _add_deployment(command)
    command.add_argument("--profile", default="plain", help="plain: Ray Serve's defaults; fast: HAProxy and throughput settings (plain)")
    command.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> None:
    """Become `serve run`: signals and the exit code are its own."""
    from rayneuron import deployment_file, devices, settings
    from rayneuron.serve.profile import profile_env, stand_in_env

    path = args.deployment
    file = deployment_file.read(path, deployment_file.parse_assignments(args.set), args.application)
    cores = stand_in_env([d for d in file.deployments.values() if devices.ranks_per_process(d.device) == 1])
    environment = settings.environment({**profile_env(args.profile), **cores, "RAY_USAGE_STATS_ENABLED": "0"})
    if args.set:
        path = _in_memory(file.content)
    sys.stdout.flush()
    run = "from ray.serve.scripts import cli; cli(prog_name='serve')"
    os.execve(sys.executable, [sys.executable, "-c", run, "run", str(path)], environment)


def _in_memory(content: Any) -> Path:
    """A file that survives exec and nothing else: no temporary file is left behind."""
    import yaml

    descriptor = os.memfd_create("deployment", 0)
    os.write(descriptor, yaml.safe_dump(dict(content), sort_keys=False).encode())
    return Path(f"/proc/self/fd/{descriptor}")


def _add_compile(commands: Any) -> None:
    command = commands.add_parser("compile", help="compile everything a deployment needs, before it is served")
    _add_deployment(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="also copy it there, for `compile.artifact` on another node")
    command.set_defaults(run=_compile)


def _compile(args: argparse.Namespace) -> None:
    from rayneuron import deployment_file
    from rayneuron.compiling import compile_ahead

    file = deployment_file.read(args.deployment, deployment_file.parse_assignments(args.set), args.application)
    for name, deployment in file.deployments.items():
        if args.application not in (None, name):
            continue
        out = args.out / name if args.out is not None and len(file.deployments) > 1 and args.application is None else args.out
        print(f"{name}: {deployment.model.served_name} on {deployment.device}")
        with _bar("graphs") as progress:
            print(compile_ahead(deployment, out, print, progress), flush=True)


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="generate offline, without Ray")
    command.add_argument("model", metavar="MODEL", help="a model directory, demo:smollm2 or demo:random:SIZE")
    command.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="may be given several times; - reads standard input"
    )
    command.add_argument("--chat", action="store_true", help="put each prompt through the chat template as a user's message")
    command.add_argument("--max-tokens", type=int, default=128)
    command.add_argument("--temperature", type=float, default=0.0)
    command.add_argument("--seed", type=int)
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of LLM: dtype=fp32, buckets.batch=[4]")
    command.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    from rayneuron import LLM, SamplingParams, config, deployment_file

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt]
    with LLM(args.model, **config.override({}, deployment_file.parse_assignments(args.set))) as llm:
        asked = [_conversation(llm, prompt) for prompt in prompts] if args.chat else prompts
        if len(asked) > 1:
            for result in llm.generate(asked, params):
                print(result.outputs[0].text)
            return
        for delta in llm.stream(asked[0], params):
            print(delta.text, end="", flush=True)
        print()


def _conversation(llm: Any, prompt: str) -> dict[str, Any]:
    return {"prompt_token_ids": llm.text.chat([{"role": "user", "content": prompt}])}


def _add_conversion(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model directory or demo:NAME")
    command.add_argument("--scheme", default="per_channel", help="one scale per_channel or per_tensor (per_channel)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")


def _convert(args: argparse.Namespace, unit: str, write: Callable[..., object], **options: Any) -> None:
    """write(model, out=..., **options) with a progress bar over so many `unit`; then the new directory is printed."""
    from rayneuron import demo

    with _bar(unit) as progress:
        write(demo.resolve(args.model), scheme=args.scheme, out=args.out, progress=progress, **options)
    print(args.out)


def _add_shard(commands: Any) -> None:
    command = commands.add_parser("shard", help="cut a checkpoint once, so that every rank reads its own file")
    _add_conversion(command)
    command.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel degree: how many ranks")
    command.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (auto: the checkpoint's)")
    command.add_argument("--quantization", help="int8, f8e4m3 or f8e5m2 weights (none)")
    command.add_argument("--unfused", action="store_true", help="keep q, k and v apart, for deployments with fused_qkv: false")
    command.set_defaults(run=_shard)


def _shard(args: argparse.Namespace) -> None:
    from rayneuron.models import presharded

    options = {"tp": args.tp, "dtype": args.dtype, "quantization": args.quantization, "fused_qkv": not args.unfused}
    _convert(args, "layers", presharded.shard, **options)


def _add_quantize(commands: Any) -> None:
    command = commands.add_parser("quantize", help="write a copy of a checkpoint with int8 or float8 weights")
    _add_conversion(command)
    command.add_argument("--dtype", default="int8", help="int8, f8e4m3 or f8e5m2 (int8)")
    command.set_defaults(run=_quantize)


def _quantize(args: argparse.Namespace) -> None:
    from rayneuron.models import quantize

    _convert(args, "tensors", quantize.quantize, dtype=args.dtype)


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in a terminal, nothing elsewhere, driven by progress(done, total)."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser("doctor", help="list cores, groups and who holds them, and what was left behind")
    command.add_argument("--address", metavar="HOST:PORT", help="also look at this Ray cluster (auto: the one of this machine)")
    command.add_argument("--instance", metavar="TYPE", help="the type of this machine, to say which of its cores are free")
    command.add_argument("--clean", action="store_true", help="remove leaked placement groups and records of owners that have ended")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from rayneuron import settings
    from rayneuron.errors import NotReady
    from rayneuron.placement import doctor, instances

    kind = instances.instance(args.instance) if args.instance else None
    for line in doctor.report(settings.ledger_dir(), kind, clean=args.clean):
        print(line)
    if args.address is not None:
        from rayneuron.serve import leaks

        try:
            for line in leaks.report(args.address, clean=args.clean):
                print(line)
        except ConnectionError as problem:
            raise NotReady(f"no Ray cluster answers at {args.address}: {problem}") from None


def _add_version(commands: Any) -> None:
    command = commands.add_parser("version", help="print the versions of what matters")
    command.set_defaults(run=_version)


def _version(args: argparse.Namespace) -> None:
    from importlib.metadata import PackageNotFoundError, version

    print("python", sys.version.split()[0])
    for name in ("rayneuron", "ray", "torch", "transformers", "torch-neuronx", "neuronx-cc"):
        try:
            print(name, version(name))
        except PackageNotFoundError:
            print(name, "not installed")
