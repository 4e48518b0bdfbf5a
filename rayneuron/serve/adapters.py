"""Adapters that come and go while the server runs: who may do that, from where, and how they reach the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rayneuron import metrics
from rayneuron.api.adapters import Change
from rayneuron.config import Deployment
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import CheckpointError, Conflict, NoRoom, RequestError, UnknownModel
from rayneuron.serve.telemetry import Values

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine
    from rayneuron.engine.sequence import Sequence

RETRY_S = 5.0  # what a client is told where there is no room


@runtime_checkable
class Adapting(Protocol):
    """A server whose adapters may change."""

    async def change_adapters(self, change: Change) -> None:
        """Load or unload one, on every replica. Raises RequestError (Conflict, UnknownModel), NoRoom, NotReady."""


async def change(config: Deployment, loop: EngineLoop, wanted: Change) -> None:
    """Load or unload an adapter of one replica. Running requests end with the adapter they began with; new ones see the change at once.

    An adapter is read on a thread of its own, while steps run, but by the engine's where other processes have to read it too.
    """
    if config.lora is None or not config.lora.allow_runtime_updating:
        how = "name all in lora.lora_modules" if config.few_graphs else "lora.allow_runtime_updating: true would allow it"
        said = f"clients of this server may not change its adapters ({how})"
        raise RequestError(said, param="lora_name")
    if wanted.path is None:
        return await asyncio.wrap_future(loop.ask(partial(_unload, name=wanted.name)))
    if wanted.name in config.model.served_names:
        raise RequestError(f"lora_name {wanted.name!r} is the model's own name; give the adapter another", param="lora_name")
    path, read, most = str(confined(wanted.path, config.lora.directory or "")), loop.engine.runner.shelf, config.lora.most
    if loop.engine.adapters.names.get(wanted.name) is not None and not wanted.replaces:
        raise _there(wanted.name)
    try:
        identity = await asyncio.to_thread(read.read, path, gently=True) if read is not None and read.beside else None
        await asyncio.wrap_future(loop.ask(partial(_load, wanted=wanted, path=path, identity=identity, most=most)))
    except CheckpointError as bad:
        raise RequestError(bad.message, param="lora_path") from None


def told(engine: Engine) -> Values:
    """The slots by state, and the names of whom running and waiting requests ask for. For any thread."""
    ledger, scheduler = engine.adapters, engine.scheduler
    names = {identity: name for name, identity in ledger.names.items()}

    def asked(sequences: Iterable[Sequence]) -> str:
        return ",".join(sorted({names[s.request.adapter] for s in sequences if s.request.adapter in names}))

    labels = str(ledger.slots), asked(list(scheduler.waiting)), asked(list(scheduler.running))
    slots: dict[tuple[str, ...], float] = {(state,): count for state, count in ledger.states().items()}
    return {metrics.LORA_REQUESTS: {labels: time.time()}, metrics.LORA_SLOTS: slots}


def confined(path: str, directory: str, field: str = "lora_path", key: str = "lora.directory") -> Path:
    """A path under the directory, with links resolved, its files' too. Raises RequestError; what is outside is not looked at. `field` and
    `key`: where the two are written."""
    root = Path(directory).resolve()
    try:
        found = (root / path).resolve()
        inside = [found, *(entry.resolve() for entry in found.iterdir())] if found.is_relative_to(root) and found.is_dir() else [found]
    except (OSError, RuntimeError, ValueError):  # a loop of links, a byte no path has, a folder that may not be read
        raise RequestError(f"{field} {path!r} cannot be read", param=field) from None
    if found == root or not all(each.is_relative_to(root) for each in inside):
        said = f"{field} {path!r} does not lie under {key}; put what it names there, and what its links lead to"
        raise RequestError(said, param=field)
    return found


def _load(engine: Engine, wanted: Change, path: str, identity: str | None, most: int) -> None:
    """On the engine's thread: the name means the adapter from the next request on."""
    ledger, shelf = engine.adapters, engine.runner.shelf
    assert shelf is not None
    if identity is None or identity not in shelf.kept:  # who had the same under another name may have gone meanwhile
        identity = shelf.read(path)
    fresh = identity not in ledger.kept
    try:
        if wanted.name in ledger.names and not wanted.replaces:
            raise _there(wanted.name)
        if fresh and len(ledger.kept) >= most:
            said = f"the host keeps {most} adapters, as many as it may (lora.max_cpu_loras); unload one, or wait until its requests end"
            raise NoRoom(said, retry_after_s=RETRY_S)
    except (RequestError, NoRoom):
        if fresh:
            shelf.drop(identity)
        raise
    ledger.name(wanted.name, identity)


def _unload(engine: Engine, name: str) -> None:
    if name not in engine.adapters.names:
        raise UnknownModel(f"The adapter `{name}` does not exist.", param="lora_name")
    engine.adapters.forget(name)


def _there(name: str) -> Conflict:
    return Conflict(f"The adapter `{name}` is loaded already; send load_inplace: true to replace it.", param="lora_name")
