"""check: greedy tokens and logprobs of a model against transformers."""

from __future__ import annotations

import argparse
from math import inf
from typing import Any

from rayneuron.cli import offline
from rayneuron.errors import CheckpointError, ConfigError

PROMPTS = ("The capital of France is", "1, 2, 3,", "def add(a, b):", "Once upon a time", "東京は日本の首都です。", "x " * 200)
ALLOWED = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.5}  # nats; the reference is in fp32 always, so the last two are their roundings


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = offline.command(commands, "check", "compare greedy tokens and logprobs with transformers'", "MODEL")
    offline.add_model(command)
    command.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times (six of its own)")
    command.add_argument("--max-tokens", type=int, default=16, help="of each prompt's reply (16)")
    command.add_argument("--tolerance", type=float, metavar="NATS", help="of a logprob (0.001 in fp32, 0.05 in fp16, 0.5 in bf16)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it. Raises CheckpointError where more than rounding differs."""
    from rayneuron import SamplingParams

    if args.max_tokens == 0 or (args.tolerance is not None and not args.tolerance >= 0):
        raise ConfigError("--max-tokens must be at least 1, --tolerance a number from 0")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, logprobs=0, prompt_logprobs=0)
    with offline.opened(args) as llm:
        most = llm.max_model_len - args.max_tokens
        if most < 1:
            raise ConfigError(f"--max-tokens {args.max_tokens}: prompt and reply together have at most {llm.max_model_len} tokens")
        prompts = [{"prompt": text, "prompt_token_ids": llm.text.encode(text)[:most]} for text in args.prompt or PROMPTS]
        outputs, path, dtype = llm.generate(prompts, params), llm.path, llm.chosen["dtype"]
        quantised = llm.config.quantization is not None or llm.config.kv_dtype is not None
    tolerance = args.tolerance if args.tolerance is not None else inf if quantised else ALLOWED[dtype]
    wrong = []
    print(f"{'prompt':28} {'tokens':>6} {'farthest logprob':>16} {'other tokens':>13}")
    for output, (apart, margin) in zip(outputs, _apart(str(path), outputs), strict=True):
        shown = repr(output.prompt)[:28]
        print(f"{shown:28} {len(output.prompt_token_ids) + len(output.outputs[0].token_ids):6} {apart:16.2g} {margin:13.2g}")
        wrong += [shown] if apart > tolerance or margin > 2 * tolerance else []
    if wrong:
        raise CheckpointError(f"{args.model} in {dtype} is further than {tolerance} from transformers at {', '.join(wrong)}")
    within = f"within {tolerance} nats of transformers" if tolerance < inf else "quantised, so judged only where --tolerance is given"
    print(f"{args.model} in {dtype}: {within}")


def _apart(path: str, outputs: list[Any]) -> list[tuple[float, float]]:
    """Of each output, in nats of transformers in fp32: how far its logprobs are, and how much likelier than a token of it another was."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
    for output in outputs:
        made = output.outputs[0]
        ids = torch.tensor([[*output.prompt_token_ids, *made.token_ids]])
        with torch.inference_mode():
            rows = model(ids).logits[0, :-1].log_softmax(-1)
        wanted = rows.gather(1, ids[0, 1:, None])[:, 0]
        entries = zip([*output.prompt_logprobs[1:], *made.logprobs], ids[0, 1:].tolist(), strict=True)
        ours = torch.tensor([entry[token].logprob for entry, token in entries])
        new = len(made.token_ids)
        found.append(((ours - wanted).abs().max().item(), (rows[-new:].amax(-1) - wanted[-new:]).max().item()))
    return found
