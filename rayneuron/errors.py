"""The exception tree, each with its HTTP status and whether a retry helps.

RayNeuronError                     500
 ├─ ConfigError                    400  a deployment file or argument is wrong; says what to write instead
 ├─ CheckpointError                400  a model directory is incomplete, damaged or of an unknown kind
 ├─ CompileError                   500  a graph could not be built, or a shape was not listed
 ├─ DeviceError                    500  a compiled graph could not be loaded or did not run
 ├─ RequestError                   400  one request is wrong; `param` names the field
 │   ├─ NotFound                   404
 │   ├─ UnknownModel               404
 │   ├─ BodyTooLarge               413
 │   └─ UnsupportedMedia           415
 ├─ Busy                           429  queue full or no capacity; `retry_after_s`
 ├─ NotReady                       503  still loading, draining or unhealthy
 │   └─ NoRoom                     503  what is to be kept does not fit beside what is
 ├─ RequestTimeout                 408  the request's own deadline passed
 └─ WorkerLost                     503  a rank or its node died
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

TIMED_OUT: Final = "the request did not finish within its time limit"


class RayNeuronError(Exception):
    """Base of all errors this package raises on purpose."""

    status = 500
    retry = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and Ray sends errors between processes.
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild(kind: type[RayNeuronError], message: str, param: str | None, retry_after_s: float | None) -> RayNeuronError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class ConfigError(RayNeuronError):
    """A deployment file, option or command-line argument is wrong."""

    status = 400


class CheckpointError(RayNeuronError):
    """A model directory is incomplete, damaged, unsafe, or of a kind nothing here reads."""

    status = 400


class CompileError(RayNeuronError):
    """A graph could not be built, or a step asked for a shape that was never listed."""


class DeviceError(RayNeuronError, RuntimeError):
    """The device's runtime could not load or run a compiled graph."""


class RequestError(RayNeuronError):
    """One request is wrong; `param` names the field."""

    status = 400


class NotFound(RequestError):
    """What is asked for is not kept here."""

    status = 404


class UnknownModel(RequestError):
    """No model of that name is served here."""

    status = 404

    @classmethod
    def named(cls, name: str, there: Iterable[str], param: str = "model") -> UnknownModel:
        """That of a name which is none of those that are there."""
        return cls(f"The model `{name[:256]}` does not exist. There are: {', '.join(there)}", param=param)


class Conflict(RequestError):
    """What is asked for is there already."""

    status = 409


class BodyTooLarge(RequestError):
    """The request body exceeds the limit."""

    status = 413


class UnsupportedMedia(RequestError):
    """The request body is of a type, or in an encoding, that is not read here."""

    status = 415


class Busy(RayNeuronError):
    """Queues are full; try again after `retry_after_s`."""

    status = 429
    retry = True


class NotReady(RayNeuronError):
    """The engine is loading, draining or unhealthy."""

    status = 503
    retry = True


class NoRoom(NotReady):
    """What a client wants kept does not fit beside what is kept already."""


class RequestTimeout(RayNeuronError):
    """The request's own deadline passed before it ended."""

    status = 408


class WorkerLost(RayNeuronError):
    """A rank of the group, or the node it ran on, is gone."""

    status = 503
    retry = True
