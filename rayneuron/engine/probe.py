"""One step at warm-up whose logits tell whether the weights are any: through every rank and stage, as a request's would."""

from __future__ import annotations

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.runner import Runs
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.errors import CheckpointError
from rayneuron.types import Request, SamplingParams


def probe(runner: Runs, vocab: int) -> None:
    """Compute the logits behind two tokens. Raises CheckpointError where no model could have them: not finite, or all the same."""
    ids = [vocab // 2, vocab - 1][: runner.capacity.chunk]
    request = Request(id="warm-up", prompt_ids=ids, params=SamplingParams(temperature=0.0, logprobs=0, max_tokens=1))
    hold = Blocks(runner.capacity.space).admit(len(ids))
    sequence = Sequence(request, 0, ids, seed=0, max_tokens=1, order=0, prompt_len=len(ids), hold=hold)
    logits = runner.start(Plan("prefill", [Work.of(sequence, 0, len(ids))])).wait().logits
    assert logits is not None
    found = logits[0].float()
    if not found.isfinite().all():
        raise CheckpointError(
            "the model's logits are not finite: its weights hold NaN or infinity, or overflow in this dtype; check the safetensors files "
            "against their source, or write dtype: bf16 or fp32"
        )
    if (found == found[0]).all():
        raise CheckpointError(
            f"all {vocab} logits of the model are {found[0].item():g}: its weights are zero or constant; convert the checkpoint again"
        )
