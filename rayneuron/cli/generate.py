"""generate: prompts through a model offline, without Ray."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from rayneuron.cli import offline


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = offline.command(commands, "generate", "generate offline, without Ray", "MODEL --prompt TEXT")
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
    from rayneuron.errors import ConfigError

    if args.max_tokens == 0:
        raise ConfigError("--max-tokens 0 has nothing to print; write 1 or more")
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    prompts = [_read(prompt) for prompt in args.prompt]
    with offline.opened(args) as llm:
        asked = [_conversation(llm, prompt) for prompt in prompts] if args.chat else prompts
        if len(asked) > 1:
            for result in llm.generate(asked, params):
                print(result.outputs[0].text)
            return
        for delta in llm.stream(asked[0], params):
            print(delta.text, end="", flush=True)
        print()


def _read(prompt: str) -> str:
    """A prompt as UTF-8, whatever the locale took its bytes for."""
    from rayneuron.errors import ConfigError

    raw = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        raise ConfigError(f"--prompt {'of standard input' if prompt == '-' else ascii(raw)[1:]}: it is not UTF-8: {wrong.reason}") from None


def _conversation(llm: Any, prompt: str) -> dict[str, Any]:
    return {"prompt_token_ids": llm.text.chat([{"role": "user", "content": prompt}])}
