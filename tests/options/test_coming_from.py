"""docs/coming_from.md is what the tables say. `python -m tests.options.test_coming_from` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic_core import PydanticUndefined

from rayneuron import aliases, llm
from rayneuron.config import Deployment
from rayneuron.options import adapters, lmi, nxdi, ray_llm, tnx
from rayneuron.options.words import Table
from rayneuron.validation import fields
from tests import test_docs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming_from.md"
KEYS = dict(fields(Deployment))
HEAD = """# Coming from another system

Written by `python -m tests.options.test_coming_from` from the tables that translate; do not edit.

`rayneuron translate DIR` prints the deployment file that a folder with `serving.properties`, NxD's `neuron_config.json` or a YAML of
ray.serve.llm becomes, and `rayneuron serve --lmi DIR` serves the first as its container would; what is said of a name is said there too.
Programs change an import: `rayneuron.compat.transformers_neuronx`, `rayneuron.compat.nxdi`. A name that is in no table is refused with the
nearest one.
"""
PROGRAMS = """
## vLLM: programs

`LLM`, `SamplingParams` and what they give have vLLM's names: the import changes, and `lora_request` is `adapter`, a name in
`lora.lora_modules`. A parameter or a key of a prompt that is not known here is an error, never passed over. What there is no name for:
"""
SYSTEMS: tuple[tuple[str, str, Table], ...] = (
    ("transformers-neuronx: from_pretrained", "Keywords.", tnx.PRETRAINED),
    ("transformers-neuronx: NeuronConfig", "Keywords.", tnx.NEURON_CONFIG),
    ("NxD Inference: NeuronConfig", "Keywords, `neuron_config.json`, vLLM's `override_neuron_config`.", nxdi.NEURON_CONFIG),
    ("NxD Inference: OnDeviceSamplingConfig", "Keywords.", nxdi.SAMPLING),
    ("NxD Inference: LoraServingConfig", "Keywords, or the mapping they are written as.", adapters.LORA),
    (
        "DJL LMI: options",
        "`option.NAME` in serving.properties, else `OPTION_NAME`; vLLM's names below as well.",
        {name: lmi.OPTIONS[name] for name in lmi.OWN},
    ),
    ("DJL LMI: the server", "Bare keys of serving.properties.", lmi.SERVER),
    ("ray.serve.llm: LLMConfig", "`engine_kwargs` are vLLM's names.", ray_llm.LLM_CONFIG),
    ("ray.serve.llm: deployment_config", "", ray_llm.DEPLOYMENT),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for title, said, table in SYSTEMS:
        yield f"## {title}\n\n{said}\n" if said else f"## {title}\n"
        rows = [(f"`{name}`", f"`{word.key}`" if word.key else word.kind, word.there, _default(word.key), word.note or word.refused)
                for name, word in table.items()]  # fmt: skip
        yield test_docs.table(("there", "here", "default there", "default here", "what differs, or what to write"), rows)
    yield "## DJL LMI: variables\n\nEach counts where nothing above it does: the file, `HF_*`, `OPTION_*`, these.\n"
    said_by = {**lmi.HUB_VARIABLES, **lmi.VARIABLES, **lmi.SERVER_VARIABLES}
    yield test_docs.table(("variable", "option"), [(f"`{name}`", f"`{option}`") for name, option in said_by.items()])
    yield "## vLLM\n\nNames that are the same are not listed. What is refused, and why: [reference.md](reference.md#names-of-vllm).\n"
    yield test_docs.table(("there", "here"), [(f"`{name}`", f"`{ours}`") for name in aliases.NAMES if (ours := aliases.means(name))])
    yield PROGRAMS
    yield test_docs.table(("`LLM` there", "what to write"), [(f"`{name}`", instead) for name, instead in llm.INSTEAD.items()])


def _default(key: str | None) -> str:
    field = KEYS.get(key or "")
    return "" if field is None or field.default in (None, PydanticUndefined, "", []) else f"`{str(field.default).lower()}`"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.options.test_coming_from"


if __name__ == "__main__":
    PAGE.write_text(page())
