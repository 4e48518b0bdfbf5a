"""The CPU kernels against float64, for odd shapes, and bit for bit independent of rows, position in the batch and chunks."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from rayneuron.devices.cpu import library, ops, packing, panels
from rayneuron.models import ops as plain
from tests.devices.cpu.built import check_rows, opened

MARCHES = ("native", "x86-64-v3")  # what this machine has, and AVX2
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", params=MARCHES)
def kernels(request):
    yield from opened(request.param)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(kernels, w, dtype):
    return packing.pack(w, packing.Arena(), dtype, kernels.int8)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(16, 16), (1, 1), (33, 7), (100, 130), (48, 576), (200, 257), (70, 512)])
def test_products(kernels, dtype, n, k):
    w = {"a.w": draw(n, k, dtype=dtype), "a.b": draw(n, seed=1, dtype=dtype)}
    made = packed(kernels, w, dtype)
    for rows in (*range(1, 18), 50):
        x = draw(rows, k, seed=rows, dtype=dtype)
        close(kernels.linear(made, "a", x), x.double() @ w["a.w"].double().T + w["a.b"].double(), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8], ids=str)
@pytest.mark.parametrize(("n", "k"), [(33, 7), (100, 130), (600, 576), (70, 512)])
def test_a_row_has_the_same_bits_in_every_batch(kernels, dtype, n, k):
    w = {"a.w": (draw(n, k) * 40).clamp(-127, 127).to(dtype)}
    if dtype == torch.int8:
        w["a.scale"] = draw(n, 1, seed=3).abs()
    compute = torch.bfloat16 if dtype == torch.int8 else dtype
    made, x = packed(kernels, w, compute), draw(300, k, seed=2, dtype=compute)
    check_rows(kernels, made, x, (*range(2, 18), 31, 40, 97, 300))  # so many are cut into parts


@pytest.mark.parametrize("rows", [1, 5, 13])
def test_int8_products_are_exact_in_integers(kernels, rows):
    """Activations are rounded to 255 steps of their largest value; what follows is integer arithmetic."""
    weight, scale = (draw(70, 90) * 50).clamp(-127, 127).to(torch.int8), draw(70, 1, seed=1).abs()
    x = draw(rows, 90, seed=2, dtype=torch.bfloat16)
    got = kernels.linear(packed(kernels, {"a.w": weight, "a.scale": scale}, torch.bfloat16), "a", x).double()
    if kernels.int8:
        step = x.float().abs().amax(-1, keepdim=True) / 127
        x = torch.round(x.float() * (1 / step)).double() * step.double()
    want = x.double() @ weight.double().T * scale.flatten().double()
    assert (got - want).abs().max() <= 2**-8 * want.abs().max()


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_small_weights_are_what_the_plain_product_takes_them_for(kernels, stored):
    w = {"a.w": (draw(40, 64) * 20).to(stored), "a.scale": torch.full((1,), 0.02)}
    x = draw(3, 64, seed=1)
    assert torch.allclose(kernels.linear(packed(kernels, w, torch.float32), "a", x), plain.PLAIN.linear(w, "a", x), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("n", [1, 7, 16, 64, 100, 577])
def test_norms(kernels, dtype, kind, n):
    x = draw(9, n, dtype=dtype)
    for w in ({"a.w": draw(n, seed=1, dtype=dtype), "a.b": draw(n, seed=2, dtype=dtype)}, {"a.w": draw(n, seed=1, dtype=dtype)}):
        if kind == "rms":
            w.pop("a.b", None)
        got = kernels.norm(w, "a", x, kind, 1e-5)
        want = plain.norm({k: v.double() for k, v in w.items()}, "a", x.double(), kind, 1e-5)
        close(got, want, dtype)
        assert torch.equal(torch.cat([kernels.norm(w, "a", row[None], kind, 1e-5) for row in x]), got)


class Attention(ctypes.Structure):
    """`Attention` of attention.h."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in ("kv", "table")),
        *((n, ctypes.c_int32) for n in ("width", "block", "kv_heads", "size", "bytes", "panels")),
        *((name, ctypes.c_void_p) for name in ("slopes", "positions", "out")),
        ("out_stride", ctypes.c_size_t),
        *((n, ctypes.c_int32) for n in ("kind", "out_kind", "heads", "window")),
        ("scale", ctypes.c_float),
    ]


def scattered(kv, block):
    """kv [2,R,K,L,D] as blocks [N,K,2,S,D] in any order, NaN wherever there is no position, and their table int32 [R,M]."""
    rows, length = kv.shape[1], kv.shape[3]
    width = -(-length // block)
    padded = torch.full((*kv.shape[:3], width * block, kv.shape[4]), math.nan, dtype=kv.dtype)
    padded[:, :, :, :length] = kv
    parts = padded.unflatten(3, (width, block)).permute(1, 3, 2, 0, 4, 5).flatten(0, 1)  # R*M K 2 S D
    order = torch.randperm(2 * len(parts), generator=torch.Generator().manual_seed(block))[: len(parts)]
    blocks = torch.full((2 * len(parts), *parts.shape[1:]), math.nan, dtype=kv.dtype)
    blocks[order] = parts
    return blocks, order.view(rows, width).to(torch.int32)


def attend(kernels, q, kv, spans, positions, window=0, slopes=None, block=64, lying=False):
    """q [N,H,D] float32, kv [2,R,K,L,D], spans [(row, first, count)], positions int32 [N] -> float32 [N,H,D]. lying: KV in panels."""
    n, heads, size = q.shape
    blocks, blocks_of = scattered(kv, block)
    if lying:
        in_rows, blocks = blocks, torch.empty_like(blocks)
        panels.write_rows(panels.views(blocks), list(range(len(blocks))), in_rows)
    out = torch.full((n, heads * size), math.nan)
    kind = packing.KINDS[kv.dtype]
    call = Attention(q.data_ptr(), heads * size, blocks.data_ptr(), blocks_of.data_ptr(), blocks_of.shape[1], block)
    call.slopes, call.positions = slopes.data_ptr() if slopes is not None else None, positions.data_ptr()
    call.out, call.out_stride, call.kind, call.out_kind = out.data_ptr(), heads * size * 4, kind, packing.F32
    call.kv_heads, call.size, call.bytes = kv.shape[2], size, kv.element_size()
    call.panels = lying
    call.heads, call.window, call.scale = heads, window, size**-0.5
    table = (ctypes.c_int32 * (3 * len(spans)))(*(x for s in spans for x in s))
    kernels.found.rn_attend(kernels.team, ctypes.addressof(call), ctypes.addressof(table), len(spans))
    return out.view(n, heads, size)


def attend_exactly(q, kv, row, positions, window=0, slopes=None):
    """One span in float64."""
    n, heads, size = q.shape
    k, v = (kv[i, row].double().repeat_interleave(heads // kv.shape[2], 0) for i in (0, 1))  # H L D
    scores = torch.einsum("nhd,hld->nhl", q.double(), k) * size**-0.5
    at = torch.arange(kv.shape[3])
    if slopes is not None:
        scores = scores + slopes.double()[None, :, None] * at.double()
    here = positions[:, None].long()
    seen = (at <= here) & ((at > here - window) if window else torch.ones((), dtype=torch.bool))
    return torch.einsum("nhl,hld->nhd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 80), (6, 1, 96), (9, 3, 128), (8, 8, 16), (2, 1, 10)])
@pytest.mark.parametrize(("window", "alibi"), [(0, False), (5, False), (70, False), (0, True)])
def test_attention(kernels, dtype, heads, kv_heads, size, window, alibi):
    kv = draw(2, 3, kv_heads, 199, size, dtype=dtype)
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(1)) * 0.1 if alibi else None
    for start, count in [(0, 1), (15, 1), (16, 2), (63, 1), (64, 1), (127, 3), (0, 70), (120, 17), (198, 1)]:
        q = draw(count, heads, size, seed=start, dtype=dtype).float()
        positions = torch.arange(start, start + count, dtype=torch.int32)
        got = attend(kernels, q, kv, [(2, 0, count)], positions, window, slopes)
        close(got, attend_exactly(q, kv, 2, positions, window, slopes), dtype)
        for block in (16, 32, 128, 199):  # the same bits, wherever the positions lie
            assert torch.equal(attend(kernels, q, kv, [(2, 0, count)], positions, window, slopes, block), got)
        for block in (64, 128) if size % packing.PANEL == 0 else ():
            assert torch.equal(attend(kernels, q, kv, [(2, 0, count)], positions, window, slopes, block, lying=True), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lying", [False, True])
def test_what_nobody_wrote_is_never_read(kernels, dtype, lying):
    """NaN behind the last position, where an earlier owner of the block may have left it."""
    for last in (1, 2, 15, 32, 33, 63, 64, 65, 101):
        kv = draw(2, 1, 2, 128, 64, dtype=dtype)
        kv[:, :, :, last:] = math.nan
        positions = torch.arange(max(0, last - 40), last, dtype=torch.int32)
        q = draw(len(positions), 6, 64, seed=last)
        got = attend(kernels, q, kv, [(0, 0, len(positions))], positions, lying=lying)
        close(got, attend_exactly(q, kv.nan_to_num(0), 0, positions), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40])
def test_attention_has_the_same_bits_however_a_prompt_is_cut(kernels, dtype, window):
    heads, kv_heads, size, n = 6, 2, 64, 150
    kv, q = draw(2, 4, kv_heads, 160, size, dtype=dtype), draw(n, heads, size, seed=1)
    positions = torch.arange(n, dtype=torch.int32)
    whole = attend(kernels, q, kv, [(1, 0, n)], positions, window)
    single = torch.cat([attend(kernels, q[i : i + 1].clone(), kv, [(1, 0, 1)], positions[i : i + 1].clone(), window) for i in range(n)])
    assert torch.equal(whole, single)
    for cut in (1, 17, 63, 64, 65, 149):
        parts = [(q[:cut], positions[:cut]), (q[cut:], positions[cut:])]
        assert torch.equal(torch.cat([attend(kernels, a.clone(), kv, [(1, 0, len(p))], p.clone(), window) for a, p in parts]), whole)
    three = attend(
        kernels,
        torch.cat([q[:30], q, q[:9]]),
        kv,
        [(0, 0, 30), (1, 30, n), (3, 30 + n, 9)],
        torch.cat([positions[:30], positions, positions[:9]]),
        window,
    )
    assert torch.equal(three[30 : 30 + n], whole)


SEGMENT = 4096  # positions whose sums begin anew (attention.cpp)


def summed_alike(kernels, edges, dtype, window=0, alibi=False, lying=True):
    """Few queries take segments apart, by whichever thread; many take all in one piece; some begin or end inside what others do not see."""
    heads, kv_heads, size, last = 6, 2, 32, max(edges) + 150
    kv, queries = draw(2, 1, kv_heads, last, size, dtype=dtype), draw(last, heads, size, seed=3)
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(1)) * 1e-3 if alibi else None

    def found(start, count, by=attend):
        positions, q = torch.arange(start, start + count, dtype=torch.int32), queries[start : start + count].contiguous()
        if by is attend_exactly:
            return by(q, kv, 0, positions, window, slopes)
        return by(kernels, q, kv, [(0, 0, count)], positions, window, slopes, lying=lying)

    for edge in edges:
        start = edge - 100
        many = found(start, 200)
        close(many, found(start, 200, attend_exactly), dtype)
        for first, some in ((start, 1), (edge - 1, 1), (edge, 1), (edge - 1, 2), (edge - 7, 20), (start, 64), (edge + 63, 37)):
            assert torch.equal(found(first, some), many[first - start : first - start + some]), (edge, first, some)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "alibi", "lying"), [(0, False, True), (0, True, False), (5000, False, False), (40, False, True)])
def test_long_contexts_are_summed_alike_by_few_queries_and_by_many(kernels, dtype, window, alibi, lying):
    summed_alike(kernels, (SEGMENT, 2 * SEGMENT), dtype, window, alibi, lying)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_is_the_first_largest_logit(kernels, dtype):
    weight = draw(1000, 64, dtype=dtype)
    weight[900] = weight[17]  # equal rows: the lower id wins
    made = packed(kernels, {"head.w": weight}, dtype)
    x = torch.cat([draw(20, 64, seed=1, dtype=dtype), 3 * weight[17:18]])
    logits = kernels.linear(made, "head", x)
    assert logits.dtype == torch.float32
    for rows in (1, 2, 13, 21):
        ids, leads = torch.empty(rows, dtype=torch.int32), torch.empty(rows)
        part = x[-rows:].contiguous()
        for into in (None, leads.data_ptr()):
            where = (made["head.w"].address, part.data_ptr(), packing.KINDS[dtype], rows, 990, ids.data_ptr(), into)
            kernels.found.rn_best(kernels.team, *where)
            assert torch.equal(ids, logits[-rows:, :990].argmax(-1).int())
        first, second = logits[-rows:, :990].topk(2).values.unbind(-1)
        assert torch.equal(leads, first - second) and leads[-1] == 0 and (rows == 1 or leads[:-1].min() > 0)
    assert ids[-1] == 17


def test_a_team_of_many_threads_does_every_piece_once():
    found = library.library()
    if found is None:
        pytest.skip("no kernels here")
    made = ops.Kernels(found, 5, plain.PLAIN)  # more threads than cores
    w = {"a.w": draw(400, 64)}
    weights, x = packed(made, w, torch.float32), draw(3, 64)
    want = made.linear(weights, "a", x)
    assert all(torch.equal(made.linear(weights, "a", x), want) for _ in range(300))
    made.close()
