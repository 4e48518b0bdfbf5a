"""generate: prompts through a model offline, without Ray."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rayneuron.cli import offline


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = offline.command(commands, "generate", "generate offline, without Ray")
    offline.add_model(command)
    command.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="may be given several times; - reads standard input"
    )
    command.add_argument("--chat", action="store_true", help="put each prompt through the chat template as a user's message")
    command.add_argument("--max-tokens", type=int, default=128, help="of each prompt's reply (128)")
    command.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (0)")
    command.add_argument("--seed", type=int, help="of the random numbers, with a temperature (drawn anew)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import SamplingParams

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt]
    with offline.opened(args) as llm:
        asked = [_conversation(llm, prompt) for prompt in prompts] if args.chat else prompts
        if len(asked) > 1:
            for result in llm.generate(asked, params):
                print(result.outputs[0].text)
            return
        for delta in llm.stream(asked[0], params):
            print(delta.text, end="", flush=True)
        print()


def _conversation(llm: Any, prompt: str) -> dict[str, Any]:
    return {"prompt_token_ids": llm.text.chat([{"role": "user", "content": prompt}])}
