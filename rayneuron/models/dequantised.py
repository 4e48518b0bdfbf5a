"""A checkpoint of another tool's quantised products, read as if it held plain ones: each is dequantised when it is asked for.

O outputs, I inputs, G groups of inputs. A plain product is [O,I].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models import formats, hub
from rayneuron.models.formats import Format
from rayneuron.models.quantization import is_quantised

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of eight the value of each output lies
PART = 1 << 22  # values that are dequantised at a time, so that what is needed beside the product is small


def checkpoint(path: str | Path, config: Mapping[str, Any], dtype: torch.dtype, allow_pickle: bool = False) -> Mapping[str, Tensor]:
    """All tensors of a model directory by name; products that another tool quantised are in `dtype`, or int8 with a scale beside them."""
    found, how = hub.Checkpoint(path, allow_pickle), formats.read(config)
    return found if how is None else Dequantised(found, how, dtype)


class Dequantised(Mapping[str, Tensor]):
    """The tensors of `source` with `x.weight` in place of what `how` says a product is stored as. A tensor that belongs to none is there
    by its own name, and so refused by whoever reads all."""

    def __init__(self, source: hub.Checkpoint, how: Format, dtype: torch.dtype) -> None:
        self._source, self._how, self._dtype = source, how, dtype
        shapes = source.meta()
        end = "." + how.main
        stems = [name.removesuffix(end) for name in source if name.endswith(end)]
        if how.kind == "plain":
            stems = [stem for stem in stems if is_quantised(shapes[stem + end].dtype)]
        self._names: dict[str, str | None] = dict.fromkeys(source)  # to the stem of a product, None for what is read as it is
        for stem in stems:
            for part in (how.main, *how.beside, *how.maybe):
                found = self._names.pop(f"{stem}.{part}", stem)
                if found is not None and part in how.beside:
                    raise CheckpointError(f"tensor '{stem}.{part}' is missing from the checkpoint, which holds '{stem}{end}'")
            if f"{stem}.weight" in self._names:
                raise CheckpointError(f"the checkpoint holds '{stem}.weight' and '{stem}{end}'; one product is stored once")
            self._names[f"{stem}.weight"] = stem
            if shapes[stem + end].dtype == torch.int8:
                self._names[f"{stem}.weight_scale"] = None
        kinds = {"awq": self._awq, "gptq": self._gptq, "packed": self._packed, "plain": self._plain}
        self._parts: Callable[[str, slice], Tensor] = kinds[how.kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def release(self, name: str) -> None:
        """Give the pages of what a tensor is made of back."""
        stem = self._names[name]
        for part in (name,) if stem is None else (f"{stem}.{p}" for p in (self._how.main, *self._how.beside)):
            self._source.release(part)

    def __getitem__(self, name: str) -> Tensor:
        stem = self._names[name]
        if stem is None or self._source[f"{stem}.{self._how.main}"].dtype == torch.int8:
            return self._source[name]
        try:
            outputs, inputs = self._shape(stem)
            out = torch.empty(outputs, inputs, dtype=self._dtype)
            step = max(32, PART // max(inputs, 1) // 32 * 32)
            for start in range(0, outputs, step):
                part = slice(start, min(start + step, outputs))
                out[part] = self._parts(stem, part)
        except (RuntimeError, IndexError, ValueError) as e:
            said = ", ".join(f"{p} {tuple(self._source[f'{stem}.{p}'].shape)}" for p in (self._how.main, *self._how.beside))
            raise CheckpointError(f"tensors of {stem!r} do not fit each other or quantization_config: {said} ({e})") from None
        return out

    def _shape(self, stem: str) -> tuple[int, int]:
        """Outputs and inputs."""
        main, per = self._source[f"{stem}.{self._how.main}"], 32 // self._how.bits
        if self._how.kind == "plain":
            return main.shape[0], main.shape[1]
        if self._how.kind == "packed":
            outputs, inputs = self._source[f"{stem}.weight_shape"].tolist()
            if (outputs, -(-inputs // per)) != tuple(main.shape):
                raise ValueError(f"weight_shape says {outputs} x {inputs}")
            return outputs, inputs
        return (main.shape[1] * per, main.shape[0]) if self._how.kind == "awq" else (main.shape[1], main.shape[0] * per)

    def _groups(self, stem: str, index: str, inputs: int, groups: int) -> Tensor:
        """The group of every input [I]."""
        if index and f"{stem}.{index}" in self._source:
            return self._source[f"{stem}.{index}"].long()
        size = self._how.group or inputs
        if -(-inputs // size) != groups:
            raise ValueError(f"{inputs} inputs are {-(-inputs // size)} groups of {size}")
        return torch.arange(inputs) // size

    def _awq(self, stem: str, part: slice) -> Tensor:
        weight, zeros, scales = (self._source[f"{stem}.{p}"] for p in ("qweight", "qzeros", "scales"))
        words = slice(part.start // 8, -(-part.stop // 8))
        shifts = torch.tensor([4 * i for i in AWQ_ORDER], dtype=torch.int32)
        values, zero = (((t[:, words, None] >> shifts) & 15).flatten(1) for t in (weight, zeros))  # I O, G O
        group = self._groups(stem, "", len(values), len(scales))
        return ((values - zero[group]) * scales[:, part].float()[group]).T

    def _gptq(self, stem: str, part: slice) -> Tensor:
        weight, zeros, scales = (self._source[f"{stem}.{p}"] for p in ("qweight", "qzeros", "scales"))
        per = 32 // self._how.bits
        values = unpacked(weight[:, part].T, self._how.bits).T  # I O
        words = slice(part.start // per, -(-part.stop // per))
        zero = unpacked(zeros[:, words], self._how.bits)[:, : part.stop - part.start] + self._how.shift  # G O
        group = self._groups(stem, "g_idx", len(values), len(scales))
        return ((values - zero[group]) * scales[:, part].float()[group]).T

    def _packed(self, stem: str, part: slice) -> Tensor:
        weight, scale = self._source[f"{stem}.weight_packed"], self._source[f"{stem}.weight_scale"]
        inputs = self._shape(stem)[1]
        values = unpacked(weight[part], self._how.bits)[:, :inputs] - self._how.offset  # O I
        group = self._groups(stem, "weight_g_idx", inputs, scale.shape[1])
        if "weight_zero_point" in self._how.beside:
            per = 32 // self._how.bits
            words = slice(part.start // per, -(-part.stop // per))
            zero = unpacked(self._source[f"{stem}.weight_zero_point"][words].T, self._how.bits).T - self._how.offset
            values = values - zero[: part.stop - part.start, group]
        return values * scale[part].float()[:, group]

    def _plain(self, stem: str, part: slice) -> Tensor:
        weight, scale = self._source[f"{stem}.weight"][part].float(), self._source[f"{stem}.{self._how.beside[0]}"].float()
        if scale.numel() == 1:
            return weight * scale.view(())
        if self._how.block is None:
            return weight * scale.view(-1, 1)[part]
        rows, columns = self._how.block
        wide = scale[torch.arange(part.start, part.stop) // rows]
        return weight * wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [R,C] -> the values of each word, lowest bits first [R, C x values]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)
