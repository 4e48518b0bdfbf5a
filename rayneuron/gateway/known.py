"""What a gateway knows of a model, in the place of what a replica has opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron.text.text import Text

if TYPE_CHECKING:
    from rayneuron.gateway.remote import RemoteEngine


@dataclass(frozen=True, slots=True)
class Seen:
    """What a gateway knows of a model: `serve.hot.Known`."""

    engine: RemoteEngine
    text: Text
    path: Path
    generation: dict[str, Any]
    chosen: dict[str, Any]
