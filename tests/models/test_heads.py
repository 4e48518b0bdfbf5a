"""Public layouts of heads: read strictly, and what is not for this model said before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayneuron import models
from rayneuron.config import parse
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.llm import LLM
from rayneuron.models import head_layers, heads, hub
from rayneuron.sources.drafts import DraftModel, draft_model
from rayneuron.sources.fetching import wanted
from tests.models import published


@pytest.fixture(scope="module")
def raw(tiny) -> dict:
    return hub.read_config(tiny)


def read(method: str, raw: dict, config: dict, held: dict[str, Tensor]) -> heads.Heads:
    return heads.read(method, config, {name: tuple(t.shape) for name, t in held.items()}, models.architecture(raw))


def renamed(made: tuple[dict, dict[str, Tensor]], old: str, new: str) -> tuple[dict, dict[str, Tensor]]:
    """The same under other names."""
    return made[0], {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in made[1].items()}


def vllm_wrapped(raw: dict) -> tuple[dict, dict[str, Tensor]]:
    config, held = published.eagle(raw)
    return {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "model": config}, held


def shared(raw: dict) -> tuple[dict, dict[str, Tensor]]:
    config, held = published.medusa(raw, heads=3, vllm=True)
    kept = {name.replace("lm_heads.0", "lm_head"): t for name, t in held.items() if "lm_heads.1" not in name and "lm_heads.2" not in name}
    return config | {"original_lm_head": True}, kept


def modelled(made: tuple[dict, dict[str, Tensor]]) -> tuple[dict, dict[str, Tensor]]:
    """Under model., as vLLM's own files are; the head lies beside it."""
    return made[0], {name if name.startswith("lm_head") else f"model.{name}": t for name, t in made[1].items()}


LAYOUTS = {
    "medusa": published.medusa,
    "medusa, whole names": lambda raw: (lambda m: (m[0], {f"medusa_head.{n}": t for n, t in m[1].items()}))(published.medusa(raw)),
    "medusa, vLLM": lambda raw: published.medusa(raw, heads=4, blocks=2, vllm=True),
    "medusa, one head for all": shared,
    "eagle": published.eagle,
    "eagle, wrapped": vllm_wrapped,
    "eagle, under model.": lambda raw: modelled(published.eagle(raw)),
    "eagle, of qwen2": lambda raw: qwen(published.eagle(raw)),
    "eagle3": lambda raw: published.eagle3(raw, known=300),
    "eagle3, layers.0": lambda raw: renamed(published.eagle3(raw), "midlayer.", "layers.0."),
    "eagle3, own embedding": lambda raw: published.eagle3(raw, own=True),
}


def qwen(made: tuple[dict, dict[str, Tensor]]) -> tuple[dict, dict[str, Tensor]]:
    """With the biases of its queries, keys and values."""
    config, held = made
    biased = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    biases = {name.replace("weight", "bias"): t[:, 0] for name, t in held.items() if name.endswith(biased)}
    return {**config, "model_type": "qwen2"}, held | biases


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_whole(raw, name):
    """Whatever is missing, of another shape, or too much is named: of the headers, and by the loader, which agree; and ranks share it."""
    method = name.partition(",")[0]
    config, held = LAYOUTS[name](raw)
    made = read(method, raw, config, held)
    for lost in held:
        less, other = {n: t for n, t in held.items() if n != lost}, held | {lost: torch.zeros(3, 5)}
        optional = lost.endswith(("embed_tokens.weight", "fc.bias"))  # without them it is another form of the layout
        if not optional:
            with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
                read(method, raw, config, less)
        with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
            read(method, raw, config, other)
        if not optional and lost not in heads.MAPS:
            with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
                head_layers.load(made, less, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"nothing in .* reads layers\.7\.odd"):
        read(method, raw, config, held | {"layers.7.odd": torch.zeros(1)})
    loaded = [head_layers.load(made, held, dtype=torch.float32, rank=rank, ranks=2) for rank in range(2)]
    for one in loaded:
        kept = sum(t.numel() for w in (one["top"], *one["layers"]) for n, t in w.items() if n not in ("ids", "rope.freq", "embed.first"))
        counted = made.parameters(2)
        assert kept == counted.products + counted.others


@pytest.mark.parametrize(
    ("method", "make", "changes", "says"),
    [
        ("medusa", published.medusa, {"vocab_size": 500}, "they have a vocabulary of 500, the model has 512"),
        ("medusa", published.medusa, {"truncated_vocab_size": 300}, "truncated_vocab_size: 300, and such heads are not read"),
        ("medusa", published.medusa, {"medusa_num_heads": 0}, "medusa_num_heads: 0, which is to be a number from 1 to 64"),
        ("medusa", published.medusa, {"medusa_num_heads": 4}, r"tensor '3\.0\.linear\.weight' is missing"),
        ("medusa", published.medusa, {"medusa_num_heads": 2}, r"nothing in medusa heads reads 2\.0\.linear"),
        ("eagle", published.eagle, {"vocab_size": 500}, "they have a vocabulary of 500"),
        ("eagle", published.eagle, {"num_hidden_layers": 2}, "2 layers of llama; what drafts here is one layer of llama"),
        ("eagle", published.eagle, {"bias": False}, r"nothing in eagle heads reads fc\.bias"),
        ("eagle", published.eagle, {"hidden_size": 32}, "the model's does not fit: it has hidden size 64, they have 32"),
        ("eagle", published.eagle, {"intermediate_size": 32}, r"gate_proj.weight' has shape \(96, 64\), but .* promises \(32, 64\)"),
        ("eagle3", published.eagle3, {"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"'fc\.weight' has shape \(64, 192\)"),
        ("eagle3", published.eagle3, {"eagle_aux_hidden_state_layer_ids": None}, "behind 2, 1, -1 of its 2 layers; say which, rising"),
        ("eagle3", published.eagle3, {"target_hidden_size": 128}, "read hidden states of 128, the model has 64"),
        ("eagle3", published.eagle3, {"fc_norm": True}, "fc_norm: True, and such heads are not read"),
        ("eagle3", published.eagle3, {"draft_vocab_size": 300}, r"'lm_head\.weight' has shape \(512, 64\)"),
    ],
)
def test_heads_of_another_model_are_refused(raw, method, make, changes, says):
    config, held = make(raw)
    with pytest.raises(CheckpointError, match=says):
        read(method, raw, {**config, **changes}, held)


def test_a_wrong_map_of_ids_is_refused(raw):
    config, held = published.eagle3(raw, known=300)
    made = read("eagle3", raw, config, held)
    for wrong, says in (
        ({"d2t": held["d2t"] + 400}, "does not lead each of 300 ids to one of its own among 512"),
        ({"d2t": -torch.arange(300)}, "does not lead each of 300 ids"),
        ({"t2d": ~held["t2d"]}, "'d2t' and 't2d' speak of different ids"),
    ):
        with pytest.raises(CheckpointError, match=says):
            head_layers.load(made, held | wrong, dtype=torch.float32)
    ids = head_layers.load(made, held, dtype=torch.float32)["top"]["ids"]
    assert ids.tolist() == held["t2d"].nonzero()[:, 0].tolist()


def test_pickled_heads_need_a_word(raw, tmp_path):
    """As they lie on the hub: medusa_lm_head.pt, pytorch_model.bin."""
    config, held = published.medusa(raw)
    folder = published.write(tmp_path, config, held, "gone.safetensors")
    (folder / "gone.safetensors").unlink()
    torch.save(held, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"pickled weights \(medusa_lm_head\.pt\).* allow_pickle: true"):
        heads.shapes(folder)
    assert heads.shapes(folder, True) == {name: tuple(t.shape) for name, t in held.items()}
    names = [file.name for file in folder.iterdir()]
    assert sorted(wanted(names, True, True)) == sorted(names) and wanted(names, True, False) == ["config.json"], "what is fetched of a hub"


@pytest.mark.parametrize("name", LAYOUTS)
def test_heads_are_no_draft_model(tiny, raw, tmp_path, name):
    """Whoever names them without a method, as vLLM allows, is told which; the plain files of EAGLE do not say what they are."""
    method = name.partition(",")[0]
    folder = published.write(tmp_path, *LAYOUTS[name](raw))
    config = parse({"model": {"path": str(tiny)}, "speculative_config": {"model": str(folder)}})
    if method != "eagle" or "wrapped" in name:
        with pytest.raises(ConfigError, match=f"holds {method} heads and no model; write method: {method}"):
            draft_model(config, tiny, models.architecture(raw), 128, Path)
    else:
        assert heads.kind(hub.read_config(folder)) is None


def ask(tiny: Path, folder: Path, method: str, **more) -> DraftModel | None:
    said = {"method": method, "model": str(folder), **more}
    config = parse({"model": {"path": str(tiny)}, "dtype": "fp32", "speculative_config": said})
    return draft_model(config, tiny, models.architecture(hub.read_config(tiny)), 128, Path)


def test_what_a_deployment_says_of_them_is_held_against_them(tiny, raw, tmp_path):
    medusa = published.write(tmp_path / "medusa", *published.medusa(raw), "medusa_lm_head.safetensors")
    eagle = published.write(tmp_path / "eagle", *published.eagle(raw, max_position_embeddings=100))
    found = ask(tiny, medusa, "medusa"), ask(tiny, eagle, "eagle", num_speculative_tokens=9)
    assert [(each.most, each.limit, each.dtype) for each in found if each] == [(3, 128, "fp32"), (None, 100, "fp32")]
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 4 is more than the 3 heads of .* draft; write 3, or leave it out"):
        ask(tiny, medusa, "medusa", num_speculative_tokens=4)
    with pytest.raises(CheckpointError, match=r"speculative_config.model .*: these are medusa heads, and not eagle; write method: medusa"):
        ask(tiny, medusa, "eagle")
    with pytest.raises(CheckpointError, match=r"speculative_config.model .*eagle: they read the model behind 2, 1, -1 of its 2 layers"):
        ask(tiny, eagle, "eagle3")
    with pytest.raises(ConfigError, match=r"speculative_config.model: .*is not a directory"):
        LLM(tiny, speculative_config={"method": "eagle", "model": "/nowhere"})
