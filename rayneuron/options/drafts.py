"""Words of speculation: NxD Inference's and LMI's, as `speculative_config` here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rayneuron.options.shared import OFF
from rayneuron.options.words import Args, Said, Table, Word, flag, literal, whole

SECTION: Final = "speculative_config"
MODEL: Final = f"{SECTION}.model"
NO_DRAFT = (
    "a draft model is speculative_config: {model: DIR, num_speculative_tokens: 4}, and heads are that with method: medusa, eagle or eagle3"
)
LAID_OUT = "a draft model is cut and laid out as the model is"
# NxD's words of what drafts.
_WHO = ("fused_spec_config", "draft_model_path", "enable_fused_speculation", "enable_eagle_speculation", "is_medusa")
_FUSED = ("worker_cls", "draft_config", "draft_model_path", "draft_model_cls")  # of its FusedSpecNeuronConfig


def _on(args: Args, name: str) -> bool:
    return args.get(name) not in OFF


def _method(name: str) -> Any:
    def read(value: Any, args: Args) -> Said:
        return Said({f"{SECTION}.method": name} if flag(value) else {})

    return read


def _length(value: Any, args: Args) -> Any:
    """Alone it is half of what NxD is told: the program hands its draft model to generate()."""
    if not any(_on(args, name) for name in _WHO):
        raise ValueError(f"{value} says nothing of what drafts; {NO_DRAFT}")
    return Said() if _on(args, "is_medusa") else whole(value)


def _heads(value: Any, args: Args) -> Any:
    return whole(value) if _on(args, "is_medusa") else Said()


def _fused(value: Any, args: Args) -> Said:
    """NxD: enabled by itself with EAGLE."""
    fused = flag(value) and not _on(args, "enable_eagle_speculation")
    return Said({f"{SECTION}.method": "draft_model"} if fused else {})


def _mapping(value: Any) -> dict[str, Any]:
    found = literal(value)
    return dict(found) if isinstance(found, Mapping) else dict(vars(found))


def _config(value: Any, args: Args) -> Said:
    """The draft's own InferenceConfig: what is not as the model's."""
    inner = _mapping(_mapping(value).get("neuron_config", {}))
    said = Said({f"{SECTION}.draft_tensor_parallel_size": whole(inner["tp_degree"])} if "tp_degree" in inner else {})
    if _on(inner, "quantized") and not _on(inner, "is_eagle_draft"):
        said[f"{SECTION}.quantization"] = str(inner.get("quantization_dtype") or "int8").removeprefix("torch.")
    return said


def _fusion(value: Any, args: Args) -> Said:
    """FusedSpecNeuronConfig, as an object or as the mapping it is written as."""
    held = _mapping(value)
    if (unknown := next((name for name in held if name not in _FUSED), None)) is not None:
        raise ValueError(f"FusedSpecNeuronConfig knows no {unknown}; known are {', '.join(_FUSED)}")
    if not held.get("draft_model_path"):
        raise ValueError("names no draft_model_path; write the directory of the draft model, or of the heads")
    more = _config(held["draft_config"], args) if held.get("draft_config") is not None else Said()
    return Said({MODEL: str(held["draft_model_path"]), **more})


def _beside(key: str) -> Any:
    """LMI: of a draft model, and without meaning where none is named."""

    def read(value: Any, args: Args) -> Said:
        named = _on(args, "speculative_draft_model") or _on(args, "draft_model_id")
        return Said({f"{SECTION}.{key}": whole(value)} if named else {})

    return read


NXDI: Final[Table] = {
    "trace_tokengen_model": Word(note="a model decodes by itself as well, where no draft pays", there="true"),
    "speculation_length": Word(f"{SECTION}.num_speculative_tokens", _length, OFF, there="0"),
    "spec_batch_size": Word(note="any row of a step may have drafts", there="batch_size"),
    "enable_fused_speculation": Word(f"{SECTION}.method", _fused, OFF, there="with EAGLE"),
    "enable_eagle_speculation": Word(f"{SECTION}.method", _method("eagle"), OFF, there="false"),
    "enable_eagle_draft_input_norm": Word(note="the tensors of the heads say whether there is one", there="false"),
    "is_eagle_draft": Word(note="it is said of what drafts, whose tensors say it here", there="false"),
    "is_medusa": Word(f"{SECTION}.method", _method("medusa"), OFF, there="false"),
    "num_medusa_heads": Word(f"{SECTION}.num_speculative_tokens", _heads, OFF, there="0"),
    "medusa_speculation_length": Word(note="a step tries a token of each head, not a tree of them", there="0"),
    "medusa_tree": Word(note="a step tries a token of each head, not a tree of them"),
    "fused_spec_config": Word(MODEL, _fusion, (None,)),
    "worker_cls": Word(note="the draft model's family is that of its config.json"),
    "draft_config": Word(f"{SECTION}.quantization", _config, (None,), note=LAID_OUT),
    "draft_model_path": Word(MODEL, there="none"),
}
LMI: Final[Table] = {
    "speculative_draft_model": Word(MODEL, same=OFF, there="none"),
    "draft_model_id": Word(MODEL, same=OFF, there="none"),
    "speculative_length": Word(f"{SECTION}.num_speculative_tokens", _beside("num_speculative_tokens"), OFF, there="5"),
    "spec_length": Word(f"{SECTION}.num_speculative_tokens", _beside("num_speculative_tokens"), OFF, there="0"),
    "draft_model_tp_size": Word(
        f"{SECTION}.draft_tensor_parallel_size", _beside("draft_tensor_parallel_size"), OFF, there="the model's degree"
    ),
    "draft_model_compiled_path": Word(note="graphs hold model and draft model, and are kept at compiled_graph_path", there="none"),
}
