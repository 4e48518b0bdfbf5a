"""The engine without Ray: a batch, a stream, a chat, and HuggingFace's generate(). Run: python examples/offline.py"""

from __future__ import annotations

import torch

from rayneuron import LLM, SamplingParams
from rayneuron.hf import HuggingFaceGenerationAdapter


def main() -> None:
    """Each way once, on the demo model."""
    with LLM("demo:smollm2", dtype="bf16", max_model_len=512, max_num_seqs=4) as llm:
        print("ready:", {part: round(seconds, 1) for part, seconds in llm.seconds.items()})

        for output in llm.generate(["The capital of France is", "1, 2, 3,"], SamplingParams(temperature=0, max_tokens=8)):
            print(repr(output.prompt), "->", repr(output.outputs[0].text))

        messages = [{"role": "user", "content": "Name three colours."}]
        answer = llm.chat(messages, {"temperature": 0, "max_tokens": 40})[0].outputs[0]
        print("chat:", answer.text, f"({answer.finish_reason})")

        print("stream: ", end="")
        for delta in llm.stream("Once upon a time", {"temperature": 0.8, "seed": 7, "max_tokens": 24}):
            print(delta.text, end="", flush=True)
        print()

        model = HuggingFaceGenerationAdapter(llm)
        ids = torch.tensor([llm.text.encode("The opposite of hot is")])
        print("generate():", llm.text.decode(model.generate(ids, max_new_tokens=4)[0].tolist()))


if __name__ == "__main__":
    main()
