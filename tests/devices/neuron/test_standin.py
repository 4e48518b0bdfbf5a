"""The stand-in is as strict as the SDK is documented or reported to be: what each rule refuses, in the SDK's words, and what passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayneuron.devices.neuron import releases

FLAGS = releases.arguments("decode", 128, "inf2", 1, False, releases.CompilerOptions())
WIDE, SOME = torch.zeros(2, 2000), torch.zeros(2, 300)
INTS = torch.zeros(2, 300, dtype=torch.int32)
BF16 = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)


class Module(nn.Module):
    """`work` of the input, beside a weight and two states, one in a nested module."""

    def __init__(self, work: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.work, self.inner = work, nn.Module()
        self.register_buffer("kv", torch.zeros(4, 8, dtype=dtype))
        self.inner.register_buffer("deep", torch.zeros(4, 8))
        self.w = nn.Parameter(torch.ones(8, 4), requires_grad=False)

    def forward(self, x: Tensor | None = None) -> Any:
        return self.work(self, x)


def rebound(module: Module, x: Tensor) -> Tensor:
    module.kv = module.kv + 1
    module.inner.deep = module.inner.deep + 1
    return x + module.w[0, 0]


def traced(work: Callable[..., Any], x: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    from neuronx_distributed.trace.functions import trace
    from neuronx_distributed.trace.parallel_context import NxDParallelState

    with NxDParallelState():
        return trace(Module(work, dtype), kwargs={"x": x})


def compiled(made: Any, folder: Path, flags: str = FLAGS) -> Any:
    from neuronx_distributed.trace.functions import compile

    try:
        return compile(made.hlo, made.metaneff, folder, flags, "one")
    except RuntimeError as problem:
        assert str(problem) == "Compilation failed for one"
        assert str(problem.__cause__) in "".join(log.read_text() for log in folder.rglob("log-neuron-cc.txt"))
        raise problem.__cause__ from None


def test_states_are_what_is_rebound(standin: Path) -> None:
    """Probes 9 and 10: a buffer written in place is refused, one rebound is a state wherever it lies; weights are those that are used."""
    from torch_neuronx.proto.metaneff_pb2 import MetaTensor

    made = traced(rebound, torch.zeros(2))
    held = [i.checkpoint_key for i in made.metaneff.input_tensors if i.type is MetaTensor.Type.INPUT_STATE]
    assert held == [b"kv", b"inner.deep"] and list(made.metaneff.output_aliases_to) == [1, 2] and list(made.weight_name_to_idx) == ["w"]

    def moved(module: Module, x: Tensor) -> Tensor:
        module.kv = module.kv * 2
        return x + 1

    assert traced(moved, torch.zeros(2)).weight_name_to_idx == {}
    with pytest.raises(RuntimeError, match="HLO generation failed: in-place operation on buffer kv: Not Supported"):
        traced(lambda m, x: m.kv.copy_(m.kv + x[0]) + 0, torch.zeros(2))
    with pytest.raises(RuntimeError, match="in-place operation on buffer inner.deep"):
        traced(lambda m, x: m.inner.deep.add_(x[0]) + 0, torch.zeros(2))

    def unread(module: Module, x: Tensor) -> Tensor:
        module.kv = torch.ones(4, 8) + x[0]
        return x + 1

    with pytest.raises(RuntimeError, match=r"states \['kv'\] are rebound and not read"):
        traced(unread, torch.zeros(2))


REFUSED: dict[str, tuple[Callable[..., Any], Tensor, str]] = {
    "sort of integers": (lambda m, x: x.argsort(-1).int(), INTS, "NCC_EVRF013.*TopK does not support int32"),
    "sort": (lambda m, x: x.sort(-1).values, SOME, "NCC_EVRF001.*An unsupported operator was used. aten.sort"),
    "top-k of integers": (lambda m, x: x.topk(3)[0], INTS, "NCC_EVRF013"),
    "too many": (lambda m, x: x.topk(20000)[0], torch.zeros(1, 30000), "NCC_EVRF014"),
    "wide cumsum": (lambda m, x: x.cumsum(-1), WIDE, "aten.cumsum.default of 2000 torch.float32: a reduce-window"),
    "whole cumsum": (lambda m, x: x.cumsum(-1).int(), INTS, "a reduce-window"),
    "infinity": (lambda m, x: torch.where(x > 0, x, float("-inf")), SOME, "infinite constant"),
    "infinite tensor": (lambda m, x: x + torch.tensor([float("inf")] * 300), SOME, "infinite constant"),
    "float64": (lambda m, x: x.double().sum().float(), SOME, "NCC_ESPP004.*f64"),
    "integer scatter-add": (lambda m, x: torch.zeros(9, dtype=torch.int32).index_add(0, x[0, :3].long(), x[0, :3]), INTS, "NCC_EVRF016"),
    "attention": (lambda m, x: nn.functional.scaled_dot_product_attention(x, x, x), BF16, "no kernel there"),
}
TAKEN: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "top-k": (lambda m, x: x.topk(256)[0], SOME),
    "cumsum of candidates": (lambda m, x: x[:, :256].cumsum(-1), SOME),
    "finite mask": (lambda m, x: torch.where(x > 0, x, -3000.0).softmax(-1), SOME),
    "bf16 attention": (lambda m, x: ((x @ x.mT).float().softmax(-1).bfloat16() @ x), BF16),
    "argmax": (lambda m, x: x.argmax(-1).int(), WIDE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operators_the_compiler_does_not_take(standin: Path, name: str, tmp_path: Path) -> None:
    work, x, said = REFUSED[name]
    with pytest.raises(RuntimeError, match=said):
        compiled(traced(work, x), tmp_path)


@pytest.mark.parametrize("name", TAKEN)
def test_operators_it_takes(standin: Path, name: str, tmp_path: Path) -> None:
    assert compiled(traced(*TAKEN[name]), tmp_path).get_neff_bytes()


def test_what_reads_on_the_host(standin: Path) -> None:
    with pytest.raises(RuntimeError, match="HLO generation failed"):
        traced(lambda m, x: x.nonzero(), SOME)
    with pytest.raises(RuntimeError, match="input x is torch.int64; the device has none"):
        traced(lambda m, x: x + 1, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--auto-cast=none -O2 --foo", "unrecognized arguments: --foo"),
        ("-O4", "invalid choice: '4'"),
        (f"{FLAGS} --internal-hlo2tensorizer-options='--verify-hlo=true'", "given twice; they do not merge"),
        ("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3", "unrecognized arguments"),
        ("--internal-hlo2tensorizer-options='--vectorize-strided-dma'", "--vectorize-strided-dma in internal_hlo2tensorizer_options"),
        ("--lnc=2", "NCC_EARG001"),
    ],
)
def test_options_the_compiler_does_not_know(standin: Path, flags: str, said: str, tmp_path: Path) -> None:
    made = traced(rebound, torch.zeros(2))
    with pytest.raises(RuntimeError, match=said):
        compiled(made, tmp_path, flags)


CHIPS = [("inf2", 1), ("trn1", 1), ("trn2", 1), ("trn2", 2)]


@pytest.mark.parametrize("tag", ["prefill", "decode", "verify"])
@pytest.mark.parametrize(("chip", "lnc"), CHIPS)
def test_all_flags_of_ours_are_known(standin: Path, tag: str, chip: str, lnc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from neuronx_distributed.trace.compiler import parse

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    for length, float8, mixed in ((128, False, None), (65536, True, None), (128, True, True), (128, False, False)):
        said = parse(releases.arguments(tag, length, chip, lnc, float8, releases.CompilerOptions(mixed_accumulation=mixed)))
        assert said.page == (1024 if length > 128 else None) and (said.lnc or 1) == lnc


def test_float8_wants_its_flag_and_its_environment(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(module: Module, x: Tensor) -> Tensor:
        module.kv = (module.kv.to(torch.bfloat16) + x[0]).to(torch.float8_e4m3fn)
        return x + 1

    for name in releases.FLOAT8:
        monkeypatch.setenv(name, "1")
    made = traced(small, torch.zeros(2), torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="NCC_ESPP004.*f8e4m3fn"):
        compiled(made, tmp_path)
    flags = releases.arguments("decode", 128, "inf2", 1, True, releases.CompilerOptions())
    assert compiled(made, tmp_path, flags)
    monkeypatch.setenv("UNSAFE_FP8FNCAST", "")
    with pytest.raises(RuntimeError, match="UNSAFE_FP8FNCAST=1 when it is traced"):
        compiled(made, tmp_path, flags)


def loaded(made: Any, neff: Any, built: int = 1, local: int = 1) -> Any:
    from neuronx_distributed.trace.nxd_model.nxd_model import NxDModel

    model = NxDModel(built, start_rank=0, local_ranks_size=built)
    model.add("one", made, neff)
    model.local_ranks_size = local
    model.set_weights([{"w": torch.ones(8, 4)}] * local)
    model.to_neuron()
    return model


def test_what_must_agree_when_it_runs(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local ranks, the scratchpad's page, memory with what a graph and the runtime take."""
    made = traced(rebound, torch.zeros(2))
    neff = compiled(made, tmp_path, f"{FLAGS} --hbm-scratchpad-page-size=512")
    monkeypatch.setenv(releases.SCRATCHPAD, "1024")
    with pytest.raises(RuntimeError, match="compiled with a scratchpad page of 512, NEURON_SCRATCHPAD_PAGE_SIZE=1024"):
        loaded(made, neff)
    monkeypatch.setenv(releases.SCRATCHPAD, "512")
    made = traced(rebound, torch.zeros(2))
    with pytest.raises(RuntimeError, match="SPMDModel one was built for 2 local ranks, and given those of 1"):
        loaded(made, neff, built=2)
    monkeypatch.setenv("STANDIN_CORE_BYTES", str((1 << 30) + (80 << 20)))
    made = traced(rebound, torch.zeros(2))
    monkeypatch.setattr("neuronx_distributed.trace.nxd_model.runtime.USED", {})
    with pytest.raises(RuntimeError, match="NRT_RESOURCE .4.: Failed to allocate"):
        loaded(made, neff)
    with pytest.raises(AssertionError, match="Expected flattener layout type to be tuple"):
        loaded(made, neff)  # its trace was added before


def test_what_is_not_a_number_ends_a_step(standin: Path, tmp_path: Path) -> None:
    """A select is a masked sum there: an infinity that is not taken is a NaN, and one that is lost in an argmax is seen too."""

    def lost(module: Module, x: Tensor) -> Tensor:
        module.kv = module.kv + 1
        return torch.where(x > 0, x, 1 / (x - x)).argmax(-1).int() + module.w[0].int()[0]

    made = traced(lost, torch.zeros(2, 8))
    model = loaded(made, compiled(made, tmp_path))
    with pytest.raises(RuntimeError, match=r"NRT_EXEC_COMPLETED_WITH_NUM_ERR \(1003\): NaN in"):
        model.forward(model_name="one", forward_mode="ranked", x=[torch.ones(2, 8)])
