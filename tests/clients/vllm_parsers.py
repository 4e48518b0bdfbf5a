"""vLLM's own parsers of calls, run by an interpreter that has vLLM: [[parser, text], ...] on stdin, [[calls, content], ...] on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any


class Words:
    """As much of a tokenizer as the parsers ask for."""

    def get_vocab(self) -> dict[str, int]:
        return {"<tool_call>": 1, "</tool_call>": 2, "<|python_tag|>": 3}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [ord(letter) for letter in text]


def main() -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser
    from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser

    kinds = {"hermes": Hermes2ProToolParser, "llama3_json": Llama3JsonToolParser, "pythonic": PythonicToolParser}
    found = []
    for name, text in json.load(sys.stdin):
        told = kinds[name](Words()).extract_tool_calls(text, None)
        found.append([[[call.function.name, call.function.arguments] for call in told.tool_calls], told.content])
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
