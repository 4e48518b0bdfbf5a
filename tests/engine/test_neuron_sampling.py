"""NxD's on-device sampling: its documented edges by hand, and its distribution against exact probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from rayneuron.engine import neuron_sampling as nxd
from rayneuron.engine import sampling
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.errors import ConfigError, RequestError

LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0])  # cumulative .632 .865 .951 .983 ...
DRAWS = 4000


def drawn(logits: torch.Tensor, top_k: float, top_p: float, temperature: float, rule: NeuronSampling, n: int = DRAWS) -> torch.Tensor:
    """Counts [V] over n rows, their uniform numbers an even grid: exact to one draw a token."""
    rows = logits.expand(n, -1)
    u = (torch.arange(n) + 0.5) / n
    full = torch.full((n,), 1.0)
    ids, complete = nxd.sample(rows, (full * top_k).int(), full * top_p, full * temperature, u, rule)
    assert ids.dtype == torch.int32 and complete.all()
    return torch.bincount(ids.long(), minlength=logits.shape[-1])


def kept(counts: torch.Tensor) -> list[int]:
    return counts.nonzero()[:, 0].tolist()


RULE = NeuronSampling(global_topk=8)


def test_the_token_that_crosses_top_p_is_dropped() -> None:
    """Seen with NxD's own Sampler: cumulative .632/.865/.951 and top_p .95 keep {0, 1}; transformers keeps {0, 1, 2}."""
    assert kept(drawn(LOGITS, 8, 0.95, 1.0, RULE)) == [0, 1]
    ids, _ = sampling.sample(
        LOGITS.expand(100, -1), *(torch.full((100,), x) for x in (1.0,)), torch.full((100,), 8), torch.full((100,), 0.95),
        torch.zeros(100), (torch.arange(100) + 0.5) / 100,
    )  # fmt: skip
    assert sorted(set(ids.tolist())) == [0, 1, 2]
    assert kept(drawn(LOGITS, 8, 0.3, 1.0, RULE)) == [0]  # never the first
    assert kept(drawn(LOGITS, 8, 0.3, 1.0, NeuronSampling(global_topk=8, top_p_min_tokens=3))) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_top_k_is_even_over_the_candidates(top_k: int) -> None:
    counts = drawn(LOGITS, top_k, 1.0, 1.0, NeuronSampling(global_topk=4))
    assert counts.tolist() == [1000] * 4 + [0] * 4


@pytest.mark.parametrize(("top_k", "temperature", "global_topk"), [(8, 1.0, 8), (3, 1.0, 8), (8, 0.7, 8), (6, 1.6, 0), (100, 1.0, 5)])
def test_the_distribution(top_k: int, temperature: float, global_topk: int) -> None:
    """BR-43: temperature 1 is no shortcut to greedy; every kept token comes as often as its probability says."""
    counts = drawn(LOGITS, top_k, 1.0, temperature, NeuronSampling(global_topk=global_topk))
    n = min(top_k, global_topk or 8)
    expected = (LOGITS[:n] / temperature).softmax(-1) * DRAWS
    assert counts[n:].sum() == 0 and (counts[:n] - expected).abs().max() <= 1.0


def test_random_numbers_give_the_same_distribution() -> None:
    """With the engine's own counter-based numbers, by chi-square."""
    u = torch.from_numpy(sampling.uniforms([7] * DRAWS, list(range(DRAWS))))
    full = torch.ones(DRAWS)
    ids, _ = nxd.sample(LOGITS.expand(DRAWS, -1), (full * 6).int(), full, full, u, RULE)
    counts = torch.bincount(ids.long(), minlength=8)[:6].double()
    expected = LOGITS[:6].double().softmax(-1) * DRAWS
    assert chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 1e-3


def test_deterministic_is_one_half() -> None:
    rule = NeuronSampling(global_topk=8, deterministic=True)
    assert kept(drawn(LOGITS, 8, 1.0, 1.0, rule)) == [0]  # .632 covers .5
    assert kept(drawn(LOGITS, 8, 1.0, 5.0, rule)) == [2]  # .226 .411 .563


def test_a_greedy_row_leaves_its_neighbours_alone() -> None:
    """BR-42: NxD's temperature 0 makes the batch's smallest sum NaN, which switches top_p off for all; here it does not."""
    both = torch.stack([LOGITS, LOGITS])
    for u in (0.1, 0.6, 0.99):
        args = (torch.tensor([8, 8], dtype=torch.int32), torch.tensor([0.3, 0.9]), torch.tensor([1.0, 0.0]), torch.tensor([u, u]))
        ids, _ = nxd.sample(both, *args, RULE)
        assert ids.tolist() == [0, 0]


def test_argmax_and_static_parameters() -> None:
    assert kept(drawn(LOGITS, 8, 1.0, 1.0, NeuronSampling(dynamic=False))) == [0]
    static = NeuronSampling(do_sample=True, dynamic=False, top_k=2, global_topk=8)
    assert kept(drawn(LOGITS, 8, 1.0, 1.0, static)) == [0, 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((257, 1.0, 1.0), "top_k 257"), ((-2, 1.0, 1.0), "top_k -2"), ((1.5, 1.0, 1.0), "top_k 1.5"), ((5, 0.0, 1.0), "top_p"),
        ((5, 1.1, 1.0), "top_p"), ((5, 1.0, -0.1), "temperature"), ((-1, 1.0, 0.0), "write top_k: 1"), ((0, 1.0, 0.0), "write top_k: 1"),
    ],
)  # fmt: skip
def test_validation(given: tuple[float, float, float], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        nxd.check(*given)


def test_validation_accepts() -> None:
    for given in ((-1, 1.0, 1.0), (0, 0.5, 2.0), (256, 1.0, 0.0), (1, 1.0, 0.0)):
        nxd.check(*given)
    with pytest.raises(ConfigError):
        NeuronSampling(global_topk=-1)


def test_it_compiles() -> None:
    """No host read, no shape that depends on data."""

    class Sampler(torch.nn.Module):
        def forward(self, logits, top_k, top_p, temperature, uniform):
            return nxd.sample(logits, top_k, top_p, temperature, uniform, RULE)

    one = torch.ones(2)
    program = torch.export.export(Sampler(), (LOGITS.expand(2, -1).contiguous(), one.int(), one, one, one * 0.5))
    assert not program.range_constraints
    assert not [n for n in program.graph.nodes if any(w in str(n.target) for w in ("aten.item", "nonzero", "multinomial"))]


LIMITS = [
    ({"top_k": 9}, "top_k", "top_k 9 must be -1 or a whole number from 0 to 8"),
    ({"min_p": 0.1}, "min_p", "min_p is unknown to on_device_sampling.neuron_compat; leave it out"),
]


@pytest.mark.parametrize(("params", "param", "said"), LIMITS)
def test_an_engine_refuses_what_the_rule_does_not_know(tiny: Path, params: dict[str, float], param: str, said: str) -> None:
    """BR-42: at the door, naming the field; greedy requests, defaults, and every engine without the rule are not concerned."""
    from rayneuron import LLM, SamplingParams
    from rayneuron.errors import RequestError

    small = {"max_model_len": 32, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1}
    with LLM(str(tiny), **small, on_device_sampling={"neuron_compat": True, "global_topk": 8}) as llm:
        with pytest.raises(RequestError, match=said) as refused:
            llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2, **params))
        assert refused.value.param == param and refused.value.status == 400
        for fine in ({"temperature": 0.0}, {}, {"top_k": 8}, {"top_k": -1}):
            llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2, **fine))
    with LLM(str(tiny), **small) as llm:
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2, **params))


def test_what_the_host_samples_follows_the_rule(tiny: Path) -> None:
    """A bias of nothing brings the logits to the host, and the draw must stay the device's: by NxD's rule, not by transformers'."""
    from rayneuron import LLM, SamplingParams

    small = {"max_model_len": 32, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1}
    drawn = []
    with LLM(str(tiny), **small, on_device_sampling={"neuron_compat": True}) as llm:
        for more in ({}, {"logit_bias": {3: 0.0}}):
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_k=50, top_p=0.3, **more)
            drawn.append(llm.generate([{"prompt_token_ids": [5, 9]}], params)[0].outputs[0].token_ids)
    with LLM(str(tiny), **small) as llm:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, top_k=50, top_p=0.3)
        default = llm.generate([{"prompt_token_ids": [5, 9]}], params)[0].outputs[0].token_ids
    assert drawn[0] == drawn[1] != default


@pytest.mark.parametrize("how", [{"top_k": 0}, {"top_k": -1}, {"top_k": 50}, {"top_k": 0, "top_p": 0.3}, {"top_k": 2, "top_p": 0.9}])
def test_what_is_forbidden_is_never_drawn(tiny: Path, how: dict[str, float]) -> None:
    """top_k 0 draws evenly among the candidates, and a token that the request does not allow is none."""
    from rayneuron import LLM, SamplingParams

    small = {"max_model_len": 64, "max_num_seqs": 4, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1}
    with LLM(str(tiny), **small, on_device_sampling={"neuron_compat": True}) as llm:
        params = SamplingParams(n=4, max_tokens=40, temperature=1.0, seed=3, allowed_token_ids=(5, 6, 9), ignore_eos=True, **how)
        drawn = {t for choice in llm.generate([{"prompt_token_ids": [5]}], params)[0].outputs for t in choice.token_ids}
    assert drawn <= {5, 6, 9} and (len(drawn) == 3 or "top_p" in how)
