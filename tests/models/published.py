"""Heads as they are published, random or learnt, and what they say in plain torch: after the papers, with nothing of the package."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

EAGLE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
TAPS = (0, 1, 2)
LAYERS = "eagle_aux_hidden_state_layer_ids"


def medusa(target: dict, heads: int = 3, blocks: int = 1, vllm: bool = False, seed: int = 0) -> tuple[dict, dict[str, Tensor]]:
    """config.json and tensors, in FasterDecoding's names or in vLLM's."""
    draw, e, v = _random(seed), target["hidden_size"], target["vocab_size"]
    held = {}
    for i in range(heads):
        for j in range(blocks):
            at = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            held[f"{at}.weight"] = draw(e, e)
            if not vllm:
                held[f"{at}.bias"] = draw(e)
        held[f"lm_heads.{i}.weight" if vllm else f"{i}.{blocks}.weight"] = draw(v, e)
    if vllm:
        return {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": blocks, "hidden_size": e, "vocab_size": v}, held
    return {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "tiny"}, held


def eagle(target: dict, own: bool = True, seed: int = 0, heads: int = 4, groups: int = 2, **more) -> tuple[dict, dict[str, Tensor]]:
    """As SafeAILab's first: a layer without its first norm. own: with an embedding, as its files have it."""
    draw, e, f, v = _random(seed), target["hidden_size"], 96, target["vocab_size"]
    d = e // heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": e, "intermediate_size": f, "vocab_size": v}
    held = {"fc.weight": draw(e, 2 * e), "fc.bias": draw(e), **_layer("layers.0.", draw, e, e, f, heads * d, groups * d)}
    if own:
        held["embed_tokens.weight"] = draw(v, e)
    return {**EAGLE, **sizes, **more}, held


def eagle3(target: dict, known: int = 0, own: bool = False, seed: int = 0, heads: int = 4, **more) -> tuple[dict, dict[str, Tensor]]:
    """As SafeAILab's third, and vLLM's: `known` ids of the vocabulary, 0: all."""
    draw, e, f, v = _random(seed), target["hidden_size"], 96, target["vocab_size"]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": e, "intermediate_size": f, "vocab_size": v}
    held = {"fc.weight": draw(e, len(TAPS) * e), "norm.weight": 1 + draw(e), "lm_head.weight": draw(known or v, e)}
    held |= _layer("midlayer.", draw, 2 * e, e, f, e, e)
    held |= {"midlayer.hidden_norm.weight": 1 + draw(e), "midlayer.input_layernorm.weight": 1 + draw(e)}
    if own:
        held["embed_tokens.weight"] = draw(v, e)
    if known:
        ids = torch.randperm(v, generator=torch.Generator().manual_seed(seed))[:known].sort().values
        held |= {"d2t": ids - torch.arange(known), "t2d": torch.zeros(v, dtype=torch.bool).index_fill(0, ids, True)}
    said = {"draft_vocab_size": known or v, LAYERS: list(TAPS)}
    return {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], **sizes, **said, **more}, held


def write(folder: Path, config: dict, held: dict[str, Tensor], file: str = "model.safetensors") -> Path:
    """A directory of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in held.items()}, folder / file)
    return folder


def _random(seed: int):
    made = torch.Generator().manual_seed(seed)
    return lambda *size: torch.randn(size, generator=made) / (size[-1] ** 0.5 if len(size) > 1 else 10)


def _layer(at: str, draw, read: int, e: int, f: int, q: int, kv: int) -> dict[str, Tensor]:
    attention = {"q": draw(q, read), "k": draw(kv, read), "v": draw(kv, read), "o": draw(e, q)}
    inner = {"gate": draw(f, e), "up": draw(f, e), "down": draw(e, f)}
    made = {f"{at}self_attn.{n}_proj.weight": t for n, t in attention.items()} | {f"{at}mlp.{n}_proj.weight": t for n, t in inner.items()}
    return made | {f"{at}post_attention_layernorm.weight": 1 + draw(e)}


# What they compute.


def say_medusa(config: dict, held: dict[str, Tensor], hidden: Tensor) -> list[Tensor]:
    """Logits [...,V] of every head behind hidden states [...,E]."""
    vllm, out = "num_heads" in config, []
    for i in range(config.get("num_heads", config.get("medusa_num_heads"))):
        x = hidden
        for j in range(config.get("num_hidden_layers", config.get("medusa_num_layers"))):
            at = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            x = x + F.silu(F.linear(x, held[f"{at}.weight"], held.get(f"{at}.bias")))
        blocks = config.get("num_hidden_layers", config.get("medusa_num_layers"))
        out.append(F.linear(x, held[f"lm_heads.{i}.weight" if vllm else f"{i}.{blocks}.weight"]))
    return out


def rms(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return w * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def attend(config: dict, at: str, held: dict[str, Tensor], x: Tensor) -> Tensor:
    """Causal attention with rotation of x [T,read], the first at position 0."""
    heads, groups, t = config["num_attention_heads"], config["num_key_value_heads"], len(x)
    q, k, v = (F.linear(x, held[f"{at}self_attn.{n}_proj.weight"]).view(t, h, -1) for n, h in (("q", heads), ("k", groups), ("v", groups)))
    d = q.shape[-1]
    angle = torch.arange(t)[:, None] * config["rope_theta"] ** (-torch.arange(0, d, 2) / d)
    cos, sin = (torch.cat((f(angle), f(angle)), -1)[:, None] for f in (torch.cos, torch.sin))
    turned = [u * cos + torch.cat((-u[..., d // 2 :], u[..., : d // 2]), -1) * sin for u in (q, k)]
    k, v = (u.repeat_interleave(heads // groups, 1) for u in (turned[1], v))
    scores = torch.einsum("thd,shd->hts", turned[0], k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", scores, v).flatten(1) @ held[f"{at}self_attn.o_proj.weight"].T


def feed(at: str, held: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the feed-forward adds to x."""
    x = rms(x, held[f"{at}post_attention_layernorm.weight"])
    gate, up, down = (held[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def pass_eagle(config: dict, held: dict[str, Tensor], embedded: Tensor, features: Tensor) -> Tensor:
    """Features [T,E] that are guessed behind embeddings [T,E], each one id ahead of the features beside it."""
    x = F.linear(torch.cat((embedded, features), -1), held["fc.weight"], held.get("fc.bias"))
    x = x + attend(config, "layers.0.", held, x)
    return x + feed("layers.0.", held, x)


def pass_eagle3(config: dict, held: dict[str, Tensor], embedded: Tensor, features: Tensor) -> Tensor:
    """The same of what `fc` has made of residuals."""
    at = "midlayer."
    normed = rms(features, held[f"{at}hidden_norm.weight"])
    x = normed if config.get("norm_before_residual") else features
    x = x + attend(config, at, held, torch.cat((rms(embedded, held[f"{at}input_layernorm.weight"]), normed), -1))
    return x + feed(at, held, x)


class Reader:
    """What heads of any kind say behind ids of a model, by that model in transformers."""

    def __init__(self, model, config: dict, held: dict[str, Tensor]) -> None:
        self.model, self.config, self.held = model, config, held
        self.three = "draft_vocab_size" in config
        self.ids = None if "d2t" not in held else held["d2t"] + torch.arange(len(held["d2t"]))
        self.table = held.get("embed_tokens.weight", model.get_input_embeddings().weight)

    @torch.no_grad()
    def __call__(self, ids: list[int], drafts: list[int]) -> list[Tensor]:
        """Logits over the model's vocabulary of each draft, given those before it; the last of `ids` has not been read by the model."""
        states, last = self.states(ids[:-1])
        if "fc.weight" not in self.held:
            return say_medusa(self.config, self.held, last[-1])[: len(drafts)]
        found = torch.cat([states[i] for i in self.config[LAYERS]], -1) @ self.held["fc.weight"].T if self.three else last
        known, out = list(ids[1:]), []
        for draft in drafts:
            said = (pass_eagle3 if self.three else pass_eagle)(self.config, self.held, self.table[torch.tensor(known)], found)[-1]
            found, known = torch.cat((found, said[None])), [*known, draft]
            out.append(self.head(said))
        return out

    def states(self, ids: list[int]) -> tuple[list[Tensor], Tensor]:
        """The residual [T,E] behind every number of layers, and the hidden states."""
        read: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        hook.remove()
        return [state[0] for state in (*states[:-1], *read)], states[-1][0]

    def head(self, said: Tensor) -> Tensor:
        """Logits [...,V]."""
        if not self.three:
            return F.linear(said, self.held.get("lm_head.weight", self.model.get_output_embeddings().weight))
        logits = F.linear(rms(said, self.held["norm.weight"]), self.held["lm_head.weight"])
        if self.ids is None:
            return logits
        return torch.full((*said.shape[:-1], self.config["vocab_size"]), -math.inf).index_copy(-1, self.ids, logits)


def learn(reader: Reader, texts: list[list[int]], turns: int = 60) -> dict[str, Tensor]:
    """The tensors, after learning by heart what comes behind every beginning of the texts."""
    held = {n: t.float().clone().requires_grad_() if t.is_floating_point() else t for n, t in reader.held.items()}
    if "fc.weight" in held and not reader.three:
        held["lm_head.weight"] = reader.model.get_output_embeddings().weight.detach().clone().requires_grad_()
    reader.held, reader.table = held, reader.table.detach()
    with torch.no_grad():
        states = [reader.states(text) for text in texts]
    by = torch.optim.Adam([t for t in held.values() if t.requires_grad], 0.01)
    for _ in range(turns):
        loss = torch.zeros(())
        for text, (each, last) in zip(texts, states, strict=True):
            ids = torch.tensor(text)
            if "fc.weight" not in held:
                for depth, logits in enumerate(say_medusa(reader.config, held, last), 2):
                    loss = loss + F.cross_entropy(logits[:-depth], ids[depth:])
                continue
            found = torch.cat([each[i] for i in reader.config[LAYERS]], -1) @ held["fc.weight"].T if reader.three else last
            for depth in range(3):  # what it says of its own guesses too
                found = found[: len(text) - 2 - depth]
                embedded = reader.table[ids[1 + depth :][: len(found)]]
                said = (pass_eagle3 if reader.three else pass_eagle)(reader.config, held, embedded, found)
                loss = loss + F.cross_entropy(reader.head(said), ids[2 + depth :][: len(said)])
                found = said
        by.zero_grad()
        loss.backward()
        by.step()
    return {name: t.detach() for name, t in held.items()}
