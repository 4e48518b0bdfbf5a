"""Large language models on AWS Neuron behind Ray Serve; this module imports nothing heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayneuron.constraints import Beams as Beams
    from rayneuron.constraints import StructuredOutputs as StructuredOutputs
    from rayneuron.errors import RayNeuronError as RayNeuronError
    from rayneuron.types import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Beams", "RayNeuronError", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: `import rayneuron` costs milliseconds, torch costs seconds."""
    match name:
        case "LLM":
            return import_module("rayneuron.llm").LLM
        case "RayNeuronError":
            return import_module("rayneuron.errors").RayNeuronError
        case "SamplingParams":
            return import_module("rayneuron.types").SamplingParams
        case "Beams" | "StructuredOutputs":
            return getattr(import_module("rayneuron.constraints"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
