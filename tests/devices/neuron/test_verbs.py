"""Neuron's own verbs against their plain forms: attention, KV writes, sums, and choices among a vocabulary that ranks share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from rayneuron.devices.neuron import verbs
from rayneuron.engine import neuron_sampling, sampling
from rayneuron.models import choice, linear, ops
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import KvShape, KvSpace, Places
from tests.models.runs import Threads, on_ranks

ROWS, LIMIT, HEADS, DIM = 4, 48, 2, 16
WHOLE = KvSpace(rows=ROWS, limit=LIMIT, blocks=ROWS, block=LIMIT)
SMALL = KvSpace(rows=ROWS, limit=LIMIT, blocks=12, block=16)
SPARE = 128


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stores(space: KvSpace, dtype: torch.dtype, spare: int = 0) -> tuple[Tensor, Tensor]:
    shape = (space.total, HEADS, space.block + spare, DIM)
    return tuple(torch.randn(shape, generator=drawn(i)).to(dtype) for i in (1, 2))  # type: ignore[return-value]


def batch(space: KvSpace, tokens: int, order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, slots and positions of rows that hold blocks in this order; each writes behind another number of tokens."""
    width = space.width(LIMIT)
    blocks = torch.tensor([[row * width + i for i in range(width)] for row in order], dtype=torch.int32)
    positions = torch.stack([torch.arange(5 + 3 * row, 5 + 3 * row + tokens) for row in order]).to(torch.int32)
    slots = blocks.gather(1, (positions // space.block).long()) * space.block + positions % space.block
    return blocks, slots.to(torch.int32), positions


def mask(positions: Tensor, length: int, heads: int, alibi: bool, dtype: torch.dtype) -> Tensor:
    from rayneuron.models.attention import bias

    slopes = torch.linspace(0.1, 1, heads) if alibi else None
    return bias(positions, length, 0, slopes, dtype)


@pytest.mark.parametrize("length", [16, 40, 48])
@pytest.mark.parametrize("heads", [HEADS, 3 * HEADS])
@pytest.mark.parametrize(("tokens", "space", "aligned"), [(1, WHOLE, True), (3, WHOLE, True), (5, WHOLE, False), (2, SMALL, False)])
def test_attention_is_the_plain_forms(tokens: int, space: KvSpace, aligned: bool, heads: int, length: int) -> None:
    """float32 to 1e-5, with and without slopes; rows in order where KV is read where it lies, else mixed. bfloat16 is compared with
    float32 arithmetic on the same numbers: scores of up to 16 are rounded to bfloat16, as NxD Inference's are."""
    order = [0, 1, 2, 3] if aligned else [2, 0, 3]
    blocks, _, positions = batch(space, tokens, order)
    for alibi in (False, True):
        q = torch.randn(len(order), tokens, heads, DIM, generator=drawn(3))
        layer = stores(space, torch.float32)
        spare = stores(space, torch.float32, SPARE if space is WHOLE else 0)
        spare = tuple(torch.cat((one, more[:, :, space.block :]), 2) for one, more in zip(layer, spare, strict=True))
        bias = mask(positions, length, heads, alibi, torch.float32)
        want = ops.attend(q, layer, blocks[:, : space.width(length)], length, bias, 0.3)
        got = verbs.attend(aligned, q, spare, blocks[:, : space.width(length)], length, bias, 0.3)
        assert (got - want).abs().max() < 1e-5
        low = [t.bfloat16() for t in (q, *layer)]
        exact = ops.attend(low[0].float(), (low[1].float(), low[2].float()), blocks[:, : space.width(length)], length, bias, 0.3)
        bias = mask(positions, length, heads, alibi, torch.bfloat16)
        told = (low[0], (low[1], low[2]), blocks[:, : space.width(length)], length, bias, 0.3)
        off = (verbs.attend(aligned, *told).float() - exact).abs()
        assert off.max() < 5e-2 and off.mean() < 5e-3


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 6)], ids=["", "sinks"])
@pytest.mark.parametrize(("tokens", "space", "aligned"), [(1, WHOLE, True), (5, WHOLE, False), (2, SMALL, False)])
def test_capped_scores_and_sinks(tokens: int, space: KvSpace, aligned: bool, sinks: Tensor | None) -> None:
    """Of Gemma 2 and GPT-OSS; a length that no block ends at."""
    order = [0, 1, 2, 3] if aligned else [2, 0, 3]
    blocks, _, positions = batch(space, tokens, order)
    q, layer, width = torch.randn(len(order), tokens, 6, DIM, generator=drawn(3)), stores(space, torch.float32), space.width(40)
    told = (q, layer, blocks[:, :width], 40, mask(positions, 40, 6, False, torch.float32), 0.3, 5.0, sinks)
    assert (verbs.attend(aligned, *told) - ops.attend(*told)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("how", [(0, False, ()), (7, False, ()), (0, True, ()), (5, False, (5.0, torch.linspace(-1, 2, 6)))], ids=str)
def test_one_new_token_is_attended_beside_what_lies_there(how: tuple[int, bool, tuple], dtype: torch.dtype) -> None:
    """Finding 27: as the plain forms write and then attend, whatever was there at its place, and with windows, slopes, caps and sinks;
    what is written is the same, and nothing in place."""
    from rayneuron.models.attention import bias

    window, alibi, more = how
    blocks, slots, positions = batch(WHOLE, 1, [0, 1, 2, 3])
    slots[2, 0] = WHOLE.nowhere
    plain, compute = stores(WHOLE, dtype), torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    wide = tuple(torch.cat((one, torch.zeros(*one.shape[:2], SPARE, DIM).to(dtype)), 2) for one in plain)
    before = [one.float().clone() for one in wide]
    q, k, v = (torch.randn(ROWS, 1, heads, DIM, generator=drawn(i)).to(compute) for i, heads in ((3, 6), (4, HEADS), (5, HEADS)))
    mask = bias(positions, 40, window, torch.linspace(0.1, 1, 6) if alibi else None, compute)
    written = ops.write_kv(plain, slots, k, v)
    exact = ops.attend(q.float(), tuple(s.float() for s in written), blocks, 40, mask.float(), 0.3, *more)
    places = Places(positions, torch.arange(ROWS), blocks, slots, 40)
    got, stored = verbs.attend_one(WHOLE.block, q, wide, k, v, places, mask, 0.3, *more)
    off = (got.float() - exact).abs()[[0, 1, 3]].max()
    assert got.dtype == compute and got.shape == exact.shape and off < (1e-5 if compute is torch.float32 else 5e-2)
    for one, other, old, now in zip(stored, written, before, wide, strict=True):
        assert torch.equal(one.float()[:ROWS, :, : WHOLE.block], other.float()[:ROWS])
        assert torch.equal(now.float(), old), "written in place"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("tokens", "space", "aligned"), [(1, WHOLE, True), (3, WHOLE, True), (7, WHOLE, False), (7, SMALL, False)])
def test_kv_is_written_as_the_plain_form_writes_it(tokens: int, space: KvSpace, aligned: bool, dtype: torch.dtype) -> None:
    """What is to be forgotten goes to the scratch block, or behind the row, and nothing that is attended changes by it."""
    order = [0, 1, 2, 3] if aligned else [3, 1]
    _, slots, _ = batch(space, tokens, order)
    slots[1, -1] = space.nowhere
    k, v = (torch.randn(len(order), tokens, HEADS, DIM, generator=drawn(i)) for i in (4, 5))
    layer = stores(space, dtype)
    wide = tuple(torch.cat((one, torch.zeros(*one.shape[:2], SPARE, DIM).to(dtype)), 2) for one in layer) if space is WHOLE else layer
    before = [one.float().clone() for one in wide]
    want = ops.write_kv(layer, slots, k, v)
    got = verbs.write_kv(space.block, aligned, wide, slots, k, v)
    for one, other, old, now in zip(got, want, before, wide, strict=True):
        assert torch.equal(one.float()[: space.blocks, :, : space.block], other.float()[: space.blocks])
        assert torch.equal(now.float(), old), "written in place"


@pytest.mark.parametrize("size", [1, 7, 256, 512, 513, 1000, 5000])
def test_cumulative_sums(size: int) -> None:
    x = torch.rand(3, size, generator=drawn(size))
    got = verbs.cumsum(x)
    assert (got - x.double().cumsum(-1)).abs().max() < 1e-6 * size
    ones = torch.ones(2, size)
    assert torch.equal(verbs.cumsum(ones), ones.cumsum(-1)), "counts are exact"


def test_a_scale_is_not_rounded() -> None:
    """Finding 20: float32 scales of int8 weights, also where the compute dtype is bfloat16."""
    w = {"q.w": torch.randint(-127, 127, (8, 32), generator=drawn(0)).to(torch.int8), "q.scale": torch.full((8, 1), 1 / 3 + 1e-4),
         "q.b": torch.arange(8.0).bfloat16()}  # fmt: skip
    x = torch.randn(4, 32, generator=drawn(1)).bfloat16()
    exact = x.double() @ w["q.w"].double().T * w["q.scale"].double().flatten()
    got, plain = verbs.linear(w, "q", x).double() - w["q.b"].double(), linear.linear(w, "q", x).double() - w["q.b"].double()
    assert (got - exact).abs().max() <= (plain - exact).abs().max()
    full = {n: t.float() for n, t in w.items()} | {"q.w": w["q.w"]}
    assert torch.allclose(verbs.linear(full, "q", x.float()), linear.linear(full, "q", x.float()), rtol=1e-6)


class Sharing(Threads):
    """Threads that can also take their part of what all hold alike."""

    def share(self, x: Tensor, dim: int) -> Tensor:
        return torch.stack(self._all(x)).amax(0).chunk(self.ranks, dim)[self.rank]


def over_ranks(ranks: int, vocab: int, logits: Tensor, work):
    """`work(ops, this rank's logits)` of every rank, of a vocabulary padded as sharding pads it; all must give the same."""
    part = -(-vocab // ranks)
    padded = torch.nn.functional.pad(logits, (0, part * ranks - vocab), value=3.0)  # what a padded row of weights might give
    arch = replace(ARCH, vocab=vocab)

    def one(comm: Threads | Solo):
        shared = Sharing(comm.rank, comm.ranks, comm._barrier, comm._box) if isinstance(comm, Threads) else comm
        made = verbs.verbs(shared, KvShape(WHOLE, 1, 1, 4), aligned=True, together=True)
        mine = padded.chunk(ranks, -1)[shared.rank]
        head = replace(made, linear=lambda w, name, x: mine)
        return work(made, verbs.logits(arch, head, shared, {"top": {}}, mine))

    found = on_ranks(ranks, one)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


ARCH = Arch(model_type="llama", vocab=1, hidden=4, layers=1, heads=1, kv_heads=1, head_dim=4, ffn=4)


@pytest.mark.parametrize(("ranks", "vocab"), [(1, 300), (2, 1000), (4, 1000), (4, 1001), (3, 40), (4, 5000)])
def test_choices_over_ranks_are_those_of_one(ranks: int, vocab: int) -> None:
    logits = torch.randn(64, vocab, generator=drawn(vocab)) * 3
    logits[1, 7] = logits[1, vocab - 1] = 50.0  # equals on different ranks: the lowest id
    logits[2] = 1.5
    uniform = torch.rand(64, generator=drawn(ranks))
    count = 24

    def work(o: ops.Ops, mine: Tensor):
        return (o.likeliest(mine), *o.shortlist(mine, count), o.log_sum(mine), o.draw(mine, uniform))

    best, values, ids, mass, chosen = over_ranks(ranks, vocab, logits, work)
    assert torch.equal(best, choice.likeliest(logits)) and best.dtype == torch.int32
    want = choice.shortlist(logits, count)
    assert torch.equal(values, want[0]) and torch.equal(logits.gather(1, ids), values)
    assert (mass - logits.double().logsumexp(-1, keepdim=True)).abs().max() < 1e-5
    assert torch.equal(chosen, choice.draw(logits, uniform))


@pytest.mark.parametrize("ranks", [1, 4])
def test_sampling_over_ranks_draws_as_one_does(ranks: int) -> None:
    """All filters, mixed in a batch, by the engine's sampler and by NxD's rule: same ids, same rows left to the host."""
    vocab, rows = 1003, 256
    logits = torch.randn(rows, vocab, generator=drawn(1)) * 2
    some = partial(torch.rand, rows, generator=drawn(2))
    temperature = torch.where(some() < 0.2, 0.0, some() + 0.3)
    top_k = (some() * 60).int() * (some() < 0.5)
    top_p, min_p = torch.where(some() < 0.5, 1.0, some()), torch.where(some() < 0.7, 0.0, some() * 0.2)
    uniform = some()
    how = (temperature, top_k, top_p, min_p, uniform)
    ids, complete = over_ranks(ranks, vocab, logits, lambda o, mine: sampling.sample(mine, *how, candidates=64, ops=o))
    want, whole = sampling.sample(logits, *how, candidates=64)
    assert torch.equal(ids, want) and torch.equal(complete, whole) and not complete.all()
    rule = neuron_sampling.NeuronSampling(global_topk=64)
    told = (top_k.clamp(min=1), top_p.clamp(min=0.1), temperature, uniform, rule)
    ids, _ = over_ranks(ranks, vocab, logits, lambda o, mine: neuron_sampling.sample(mine, *told, ops=o))
    assert torch.equal(ids, neuron_sampling.sample(logits, *told)[0])


def test_a_draw_never_leaves_what_has_weight() -> None:
    """However the sums are rounded: uniform numbers at both ends, weights that are almost all zero, the last id the only one."""
    logits = torch.full((4, 700), -200.0)
    logits[0, 699] = logits[1, 0] = logits[2, 130] = 5.0
    logits[3, 300:400] = 5.0
    for u in (0.0, 1e-7, 0.5, 1 - 2**-24):
        uniform = torch.full((4,), u)
        chosen = over_ranks(2, 700, logits, lambda o, mine: (o.draw(mine, uniform),))[0]  # noqa: B023
        assert chosen[:3].tolist() == [699, 0, 130] and 300 <= int(chosen[3]) < 400
