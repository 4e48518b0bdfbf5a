"""Products and attention on AMX tiles, emulated and, where there are any, the processor's own: against Intel's operation in exact
arithmetic, against float64, bit for bit independent of rows."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from rayneuron.devices.cpu import isa, library, ops, packing
from rayneuron.models import ops as plain
from rayneuron.models import quantize
from rayneuron.models.collectives import Solo
from tests.devices.cpu.built import check_rows, here, opened
from tests.devices.cpu.test_families import on_kernels
from tests.devices.cpu.test_kernels import SEGMENT, attend, attend_exactly, close, draw, summed_alike
from tests.models import cases

BF16 = torch.bfloat16
SMALLEST = Fraction(1, 2**126)  # normal number of float32


@pytest.fixture(scope="module", params=[isa.EMULATED, isa.AMX])
def kernels(request):
    if request.param == isa.AMX and library.best() != isa.AMX:
        pytest.skip("no tiles here")
    assert here(library.library(request.param)).rn_features() & library.TILES, "the tiles gave wrong products"
    yield from opened(request.param)


def packed(w, dtype=BF16):
    return packing.pack(w, packing.Arena(), dtype, True)


def rounded(x: Fraction) -> Fraction:
    """To float32's 24 bits, nearest even; what is then below the normal numbers is zero."""
    if not x:
        return x
    power = abs(x.numerator).bit_length() - x.denominator.bit_length()
    power -= abs(x) < Fraction(2) ** power
    step = Fraction(2) ** (power - 23)
    near = round(x / step) * step
    return near if abs(near) >= SMALLEST else Fraction(0)


def tdpbf16ps(x: list[Fraction], w: list[Fraction], c: Fraction) -> Fraction:
    """One element of TDPBF16PS in Intel's words: even and odd products apart, by fused steps, then their sum, then c."""
    halves = [Fraction(0), Fraction(0)]
    for k, (a, b) in enumerate(zip(x, w, strict=True)):
        a, b = (v if abs(v) >= SMALLEST else Fraction(0) for v in (a, b))
        halves[k % 2] = rounded(halves[k % 2] + a * b)
    return rounded(c + rounded(sum(halves)))


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 64, 90])
@pytest.mark.parametrize("smallness", [0, -40, -62, -126])
def test_every_bit_is_what_the_manual_says(kernels, k, smallness):
    """At 2^-62 products and sums are flushed, at 2^-126 inputs are no normal numbers."""
    w, x = draw(17, k, dtype=BF16), draw(3, k, seed=1)
    x = (x * torch.exp2(torch.randint(-8, 8, x.shape, generator=torch.Generator().manual_seed(2)) + float(smallness))).to(BF16)
    if smallness == -62:
        w = (w * 2.0**-62).to(BF16)
    got = kernels.linear(packed({"head.w": w}), "head", x)
    assert got.dtype == torch.float32
    rows, columns = ([[Fraction(v) for v in row] for row in t.double().tolist()] for t in (x, w))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            want = Fraction(0)
            for s in range(0, k, 32):
                want = tdpbf16ps(row[s : s + 32], column[s : s + 32], want)
            assert Fraction(got[i, j].item()) == want, (i, j)


def test_what_cancels_to_less_than_a_normal_number_is_flushed(kernels):
    """Of the two tiles of k the first gives 1.25 x 2^-126 and the second -2^-126: what is left is a quarter of a normal number."""
    w, x = torch.zeros(3, 64), torch.zeros(2, 64)
    x[:, 3], x[:, 40] = 2.0**-63, 2.0**-63
    w[0, 3], w[0, 40] = 1.25 * 2.0**-63, -(2.0**-63)
    w[1, 3], w[1, 40] = 1.25 * 2.0**-62, -(2.0**-63)
    got = kernels.linear(packed({"head.w": w.to(BF16)}), "head", x.to(BF16))
    assert got[0].tolist() == [0, 1.5 * 2.0**-126, 0]


@pytest.mark.parametrize(("n", "k"), [(16, 16), (1, 1), (33, 7), (100, 130), (48, 576), (200, 257)])
def test_products(kernels, n, k):
    w = {"a.w": draw(n, k, dtype=BF16), "a.b": draw(n, seed=1, dtype=BF16)}
    made = packed(w)
    for rows in (*range(1, 18), 50):
        x = draw(rows, k, seed=rows, dtype=BF16)
        close(kernels.linear(made, "a", x), x.double() @ w["a.w"].double().T + w["a.b"].double(), BF16)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.int8], ids=str)
@pytest.mark.parametrize(("n", "k"), [(33, 7), (100, 130), (600, 576)])
def test_a_row_has_the_same_bits_in_every_batch(kernels, dtype, n, k):
    w = {"a.w": (draw(n, k) * 40).clamp(-127, 127).to(dtype)}
    if dtype == torch.int8:
        w["a.scale"] = draw(n, 1, seed=3).abs()
    compute = BF16 if dtype == torch.int8 else dtype
    made, x = packed(w, compute), draw(40, k, seed=2, dtype=compute)
    check_rows(kernels, made, x, (*range(2, 18), 31, 40))


@pytest.mark.parametrize("dtype", [BF16, torch.int8], ids=str)
@pytest.mark.parametrize(("n", "k", "rows"), [(70, 1600, 40), (40, 8192, 81), (33, 5000, 70)])
@pytest.mark.parametrize("gated", [False, True])
def test_many_rows_have_the_bits_of_each_alone(kernels, dtype, n, k, rows, gated):
    """Wherever rows and k are cut: chunks of k, and parts of it where rows are long."""
    name = "gate_up" if gated else "head"
    w = {f"{name}.w": (draw(2 * (n // 2), k) * 40).clamp(-127, 127).to(dtype)}
    if dtype == torch.int8:
        w[f"{name}.scale"] = draw(2 * (n // 2), 1, seed=3).abs()
    made, x = packed(w), draw(rows, k, seed=2, dtype=BF16)
    whole = kernels.linear(made, name, x)
    if dtype == BF16:
        close(whole, x.double() @ w[f"{name}.w"].double().T, BF16)
    for i in (0, 15, 16, 31, 32, rows - 1):
        assert torch.equal(kernels.linear(made, name, x[i : i + 1]), whole[i : i + 1]), i


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (40, 1, 32), (4, 2, 128), (3, 1, 80)])
@pytest.mark.parametrize(("window", "alibi"), [(0, False), (70, True)])
def test_attention(kernels, heads, kv_heads, size, window, alibi):
    """Near float64; in panels, in rows, in any block and however tokens are cut the same bits."""
    kv = draw(2, 2, kv_heads, 199, size, dtype=BF16)
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(1)) * 0.1 if alibi else None
    q, positions = draw(101, heads, size), torch.arange(98, 199, dtype=torch.int32)
    got = attend(kernels, q, kv, [(1, 0, 101)], positions, window, slopes)
    close(got, attend_exactly(q, kv, 1, positions, window, slopes), BF16)
    ways = [(64, True, 101), (64, True, 1), (128, True, 30)] if size % packing.PANEL == 0 else []
    for block, lying, cut in [(16, False, 30), (199, False, 50), *ways]:
        parts = [(q[i : i + cut].clone(), positions[i : i + cut].clone()) for i in range(0, 101, cut)]
        pieces = [attend(kernels, a, kv, [(1, 0, len(p))], p, window, slopes, block, lying) for a, p in parts]
        assert torch.equal(torch.cat(pieces), got), (block, lying, cut)


@pytest.mark.parametrize("window", [0, 40])
def test_long_contexts_are_summed_alike_by_few_queries_and_by_many(kernels, window):
    summed_alike(kernels, (SEGMENT,), BF16, window)


def test_hardware_gives_the_bits_of_the_emulation():
    if library.best() != isa.AMX:
        pytest.skip("no tiles here")
    hard, soft = (ops.Kernels(library.library(name), 2, plain.PLAIN) for name in (isa.AMX, isa.EMULATED))
    made, x = packed({"head.w": draw(100, 700, dtype=BF16)}), draw(70, 700, seed=1, dtype=BF16)
    kv, q, positions = draw(2, 1, 2, 199, 64, dtype=BF16), draw(150, 6, 64), torch.arange(40, 190, dtype=torch.int32)
    assert torch.equal(hard.linear(made, "head", x), soft.linear(made, "head", x))
    assert torch.equal(*(attend(k, q, kv, [(0, 0, 150)], positions, lying=True) for k in (hard, soft)))
    hard.close(), soft.close()


def test_int8_products_are_those_of_the_vector_instructions(kernels):
    """Integers are exact, so the extreme ones must agree to the bit."""
    vector = library.library(isa.NATIVE)
    if vector is None or not vector.rn_features() & library.INT8:
        pytest.skip("this processor multiplies no int8")
    other = ops.Kernels(vector, 2, plain.PLAIN)
    weight = torch.randint(-128, 128, (70, 3 * 64 + 20), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    weight[0], weight[1] = 127, -128
    made = packed({"head.w": weight, "head.scale": draw(70, 1, seed=1).abs()})
    for rows in (1, 16, 17, 45):
        x = draw(rows, weight.shape[1], seed=2, dtype=BF16)
        x[0] = 1
        got = kernels.linear(made, "head", x)
        assert torch.equal(got, other.linear(made, "head", x)) and got.abs().max() > 100
    other.close()


def test_fp32_products_use_no_tiles(kernels):
    w, x = draw(40, 50), draw(7, 50, seed=1)
    close(kernels.linear(packed({"a.w": w}, torch.float32), "a", x), x.double() @ w.double().T, torch.float32)


def test_greedy_is_the_first_largest_logit(kernels):
    weight = draw(1000, 64, dtype=BF16)
    weight[900] = weight[17]
    made = packed({"head.w": weight})
    x = torch.cat([draw(20, 64, seed=1, dtype=BF16), 3 * weight[17:18]])
    logits = kernels.linear(made, "head", x)
    for rows in (1, 2, 13, 21):
        ids = torch.empty(rows, dtype=torch.int32)
        part = x[-rows:].contiguous()
        kernels.found.rn_best(kernels.team, made["head.w"].address, part.data_ptr(), packing.BF16, rows, 990, ids.data_ptr(), None)
        assert torch.equal(ids, logits[-rows:, :990].argmax(-1).int())
    assert ids[-1] == 17


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("how", ["bfloat16", "int8"])
def test_a_whole_model(kernels, tmp_path, family, how):
    """Logits near transformers', the plain ops' choice wherever theirs is clear, the same bits in any batch and chunking."""
    saved = cases.save(cases.CONFIGS[family](), tmp_path)
    options = {"quantization": quantize.parse("int8")} if how == "int8" else {}
    runner = on_kernels(saved, Solo(), BF16, kernels, **options)
    n = saved.ids.shape[1]
    with torch.no_grad():
        want = cases.run(cases.Runner.open(saved.path, Solo(), dtype=BF16, **options), saved.ids, 16)
        got = cases.run(runner, saved.ids, 16)
        whole = runner.chunk(saved.ids, 0, n, n, 63)
        fresh = on_kernels(saved, Solo(), BF16, kernels, **options)
        cut = torch.cat([fresh.chunk(saved.ids[:1], s, min(s + 5, n), 5, 64) for s in range(0, n, 5)], 1)
    assert torch.equal(cut, whole[:1])
    bound = 0.05 * saved.logits.abs().max()
    assert 0 < (got - saved.logits).abs().median() < bound
    top = want.topk(2).values
    clear = top[..., 0] - top[..., 1] > bound
    assert clear.sum() >= 10 and torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


def test_the_build_for_real_tiles_contains_them(tmp_path):
    if shutil.which("g++") is None or shutil.which("objdump") is None:
        pytest.skip("no g++ or objdump")
    source, target = Path(library.__file__).with_name("many.cpp"), tmp_path / "many.o"
    command = ["g++", *library.FLAGS, *isa.flags(isa.AMX), "-march=sapphirerapids", "-c", "-o", str(target), str(source)]
    subprocess.run(command, check=True, timeout=120)
    told = subprocess.run(["objdump", "-d", str(target)], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"\b(tdp\w+|tile\w+|ldtilecfg)\b", told))
    assert found >= {"ldtilecfg", "tileloadd", "tileloaddt1", "tilezero", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"}


def test_tiles_need_the_processor_the_system_and_the_compiler(monkeypatch):
    def best(flags, permitted, compiles):
        monkeypatch.setattr(isa, "processor_flags", lambda: frozenset(flags))
        monkeypatch.setattr(isa, "permitted", lambda: permitted)
        monkeypatch.setattr(library, "_run", lambda command: "" if compiles else (_ for _ in ()).throw(OSError("unknown option")))
        isa.has_tiles.cache_clear()
        return library.best.__wrapped__()

    tiles = {"avx2", *isa.TILE_FLAGS}
    assert best(tiles, True, True) == isa.AMX
    assert best(tiles - {"amx_bf16"}, True, True) == isa.NATIVE
    assert best(tiles, False, True) == isa.NATIVE
    assert best(tiles, True, False) == isa.NATIVE
    isa.has_tiles.cache_clear()


def test_the_kernel_refuses_tiles_where_there_are_none():
    assert isa.permitted() or not isa.processor_flags() >= isa.TILE_FLAGS
    if not any(flag.startswith("amx") for flag in isa.processor_flags()):
        assert not isa.permitted() and library.best() == isa.NATIVE


def test_wrong_tiles_are_not_used(monkeypatch):
    class Wrong:
        def rn_tiles_work(self):
            return 0

    class Right(Wrong):
        def rn_tiles_work(self):
            return 1

    monkeypatch.setattr(library, "best", lambda: isa.AMX)
    monkeypatch.setattr(library, "built", lambda name, extra: name)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Wrong() if name == isa.AMX else Right())
    monkeypatch.setattr(library, "declared", lambda found: found)
    library.library.cache_clear()
    try:
        assert isinstance(library.library(), Right)
    finally:
        library.library.cache_clear()


def test_each_instruction_set_has_a_key_of_its_own():
    names = (isa.NATIVE, isa.AMX, isa.EMULATED, "x86-64-v3")
    assert len({library._key(name).digest for name in names}) == len(names)
