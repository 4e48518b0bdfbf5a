"""The process of `rayneuron serve`: starts Ray Serve, deploys, says when it is ready, and lets streams finish when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic
import ray
from ray import serve
from ray._private.ray_logging import global_worker_stdstream_dispatcher as worker_output
from ray.serve.schema import ServeDeploySchema

from rayneuron.config import Deployment
from rayneuron.errors import CheckpointError, CompileError, ConfigError, NotReady
from rayneuron.gateway_config import GatewayConfig
from rayneuron.serve import own_ray, readiness
from rayneuron.serve.lean_ray import lean

log = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.25
STARTED_PERIOD_S = 0.02
PATIENCE_S = 2.0  # beyond what replicas were given
LAST_BYTES_S = 0.5  # for Serve's proxy to hand on what replicas said last
ENDING_SHARE, ENDING_S = 0.3, 6.0  # of the grace time, at most so many seconds, go to shutting down once the streams have ended
FOR_GOOD = tuple(f"rayneuron.errors.{kind.__name__}: " for kind in (ConfigError, CheckpointError, CompileError))  # trying again is no use


Ours = Mapping[str, Deployment | GatewayConfig]  # applications by name


def run(content: Mapping[str, Any], ours: Ours, grace_s: float, alone: bool = False, forks: str | None = None) -> None:
    """Serve the applications of a deployment file until SIGTERM or Ctrl-C, then end within `grace_s`.

    Raises ConfigError or NotReady where an application cannot start. `ours`: those that are. `alone`: there is no file that could be
    changed and deployed again: nothing is started that only serves that. `forks`: what `fork_server.begin` has said.
    """
    try:
        schema = ServeDeploySchema.model_validate(content)
    except pydantic.ValidationError as wrong:
        raise ConfigError("; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in wrong.errors())) from None
    signals = Signals()
    output = Output()
    try:
        with signals.ending():
            one = next(iter(ours.values())) if alone else None
            _start(schema, signals, output, one if isinstance(one, Deployment) else None, forks)
            _wait(schema, ours)
        output.ready = True
        for line in ready_lines(schema, ours):
            print(line, flush=True)
        while not signals.asked.wait(LOOK_PERIOD_S):  # a signal that another thread takes does not end a wait
            if (gone := own_ray.ended()) is not None:
                raise NotReady(f"Ray's {gone} has ended, and all that ran in it; start again")
        output.ready = False
        _end(ours, grace_s)
    finally:
        ray.shutdown()


class Signals:
    """SIGTERM and Ctrl-C: the first asks to end, the second ends this process at once, and Ray's with it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._starting = False

    def listen(self) -> None:
        """Once more after Ray has started, which takes SIGTERM for itself."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """While there are no streams to wait for, a signal ends what runs."""
        self._starting = True
        self.listen()
        yield
        self._starting = False

    def _take(self, number: int, frame: object) -> None:
        if self.asked.is_set():
            own_ray.end_now(128 + number)
        self.asked.set()
        if self._starting:
            raise SystemExit(128 + number)


class Output:
    """What the processes of Ray print, on standard error: until all is ready only how far the start has come, then everything but chatter.

    The rest, tracebacks of a failed start among it, is in Ray's session directory as always.
    """

    LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\d\d-\d\d \S+ (\S+) \S+ (?:\S+ )?-- (.*)", re.S)

    def __init__(self) -> None:
        self.ready = False

    def take(self, batch: Mapping[str, Any]) -> None:
        """One batch of lines of one process, as Ray hands them out."""
        actor = str(batch.get("actor_name") or "")
        replica = actor.startswith("ServeReplica:")
        for line in batch["lines"]:
            said = self.LINE.match(line)
            if self.ready and actor and not (said is not None and not replica and said[1] in ("DEBUG", "INFO")):
                print(line, file=sys.stderr)
            elif not self.ready and replica and said is not None and said[1] in ("INFO", "WARNING"):
                print(said[3], file=sys.stderr)


def _start(schema: ServeDeploySchema, signals: Signals, output: Output, alone: Deployment | None, forks: str | None) -> None:
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    sys.path.insert(0, os.getcwd())  # as `serve run` does, for applications beside the file; Ray's workers take it over
    log.info("starting Ray")
    if alone is None:
        ray.init(namespace="serve")  # with a dashboard, which `serve deploy` speaks to
    else:
        with lean(forks):
            ray.init(namespace="serve", include_dashboard=False)
    log.info("Ray has started")
    signals.listen()
    worker_output.remove_handler("ray_print_logs")
    worker_output.add_handler("rayneuron", output.take)
    controller = schema.controller_options if alone is None else None  # our environment says it all, and no process is started to say it
    failed: list[BaseException] = []
    starting = threading.Thread(target=_start_serve, args=(schema, controller, failed), daemon=True)
    starting.start()
    # The controller is there before the proxies are ready, and replicas start beside them.
    while (client := serve.context._get_global_client(raise_if_no_controller_running=False)) is None and starting.is_alive():
        time.sleep(STARTED_PERIOD_S)
    if client is not None:
        _deploy(client, schema, alone)
    starting.join()
    if failed:
        raise failed[0]
    log.info("Serve has started")


def _start_serve(schema: ServeDeploySchema, controller: Any, failed: list[BaseException]) -> None:
    proxies = {"proxy_location": schema.proxy_location, "http_options": schema.http_options.model_dump()}
    try:
        serve.start(**proxies, grpc_options=schema.grpc_options.model_dump(), controller_options=controller)
    except BaseException as wrong:
        failed.append(wrong)


def _deploy(client: Any, schema: ServeDeploySchema, alone: Deployment | None) -> None:
    if alone is None:
        client.deploy_apps(schema, _blocking=False)
        return
    from rayneuron.serve.app import application_of  # built here, where all is imported, not by a process of its own

    (said,) = schema.applications
    target = serve.RunTarget(application_of(alone), said.name, said.route_prefix)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _wait(schema: ServeDeploySchema, ours: Ours) -> None:
    """Return when every application runs and ours answer."""
    names = [application.name for application in schema.applications]
    while True:
        states = readiness.look()
        for name in names:
            if name in states:
                _check(name, states[name])
        if all(name in states and states[name].status == "RUNNING" for name in names):
            break
        time.sleep(LOOK_PERIOD_S)
    until = time.monotonic() + 30  # Serve says so before its proxies know
    while time.monotonic() < until and not all(_answers(schema, prefix) for prefix in _prefixes(schema, ours).values()):
        time.sleep(LOOK_PERIOD_S)


def _check(name: str, state: readiness.State) -> None:
    if state.status == "DEPLOY_FAILED" or any(kind in state.message for kind in FOR_GOOD):
        raise NotReady(f"application {name} cannot start: {readiness.cause(state.message)}")


def _answers(schema: ServeDeploySchema, prefix: str) -> bool:
    return _get(schema, f"{prefix}/health") is not None


def _get(schema: ServeDeploySchema, path: str) -> bytes | None:
    """What a path says through the proxy, None where it is no 200."""
    options = schema.http_options
    secure: Any = {} if options.ssl_certfile is None else {"context": ssl._create_unverified_context()}  # it names another host
    made: Any = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = made(_reachable(options.host), options.port, timeout=5, **secure)
    try:
        connection.request("GET", f"{options.root_path}{path}")
        reply = connection.getresponse()
        return reply.read() if reply.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def ready_lines(schema: ServeDeploySchema, ours: Ours) -> list[str]:
    """Where each of our models answers, and what its start chose: the last lines of a start."""
    options, lines = schema.http_options, []
    host = _reachable(options.host)
    base = f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{options.port}{options.root_path}"
    for name, prefix in _prefixes(schema, ours).items():
        one = ours[name]
        said, more = name, ""
        if isinstance(one, Deployment):
            said, more = one.model.served_name, _chosen(schema, prefix)
        else:
            more = f"; models: {', '.join(listed.title for listed in one.models)}"
        chat = f"{base}{prefix}/ (chat), " if one.serving.page else ""
        lines.append(f"{said} is ready: {chat}{base}{prefix}/v1 (OpenAI){more}")
    return lines


def _chosen(schema: ServeDeploySchema, prefix: str) -> str:
    """What /load says of it, where it may be asked."""
    said = _get(schema, f"{prefix}/load")
    chosen = json.loads(said).get("chosen") if said else None
    shape = "; {device}, {dtype}, tp {tensor_parallel} x pp {pipeline_parallel}, {cores} cores, "
    return (shape + "max_model_len {max_model_len}, {rows} rows, {kv_tokens} KV tokens, {graphs} graphs").format(**chosen) if chosen else ""


def _prefixes(schema: ServeDeploySchema, ours: Ours) -> dict[str, str]:
    return {a.name: (a.route_prefix or "").rstrip("/") for a in schema.applications if a.name in ours and a.route_prefix}


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _end(ours: Ours, grace_s: float) -> None:
    """Within the grace time, come what may: streams first, then the applications."""
    print(f"ending within {grace_s:g} s, streams first; a second signal ends at once", file=sys.stderr, flush=True)
    left = threading.Event()
    threading.Thread(target=own_ray.watch, args=(time.monotonic() + grace_s, left), daemon=True).start()
    gateways = [name for name, one in ours.items() if isinstance(one, GatewayConfig)]
    rounds = [gateways, [name for name in ours if name not in gateways]]
    asyncio.run(_leave(rounds, max(0.0, grace_s - min(ENDING_S, ENDING_SHARE * grace_s))))
    left.set()
    ray.shutdown()
    sys.stderr.flush()
    os._exit(0)  # what Ray has registered for the end of the interpreter takes seconds, and finds nothing left to do


async def _leave(rounds: Sequence[Sequence[str]], within_s: float) -> None:
    """Every replica of ours takes no more; when its streams have ended, by themselves or by an error event, Serve is shut down.

    `rounds`: gateways before the models they send their streams to.
    """
    until_s = time.monotonic() + within_s

    async def drain(name: str) -> None:
        left_s = max(0.0, until_s - time.monotonic())
        replies = serve.get_app_handle(name).broadcast("drain", left_s)
        for wrong in await replies.results_async(timeout_s=left_s + PATIENCE_S, return_exceptions=True):
            if wrong is not None:
                raise wrong

    for names in rounds:
        for name, wrong in zip(names, await asyncio.gather(*map(drain, names), return_exceptions=True), strict=True):
            if wrong is not None:
                log.warning("%s did not say that its streams have ended: %r", name, wrong)
    await asyncio.sleep(LAST_BYTES_S)
    ray._private.worker._worker_logs_enabled = False  # it calls the end of Serve's controller, which is meant, a failure
    await serve.shutdown_async()  # here: in the profile `fast` handles belong to the event loop they were made in
