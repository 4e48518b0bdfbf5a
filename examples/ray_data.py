"""Rows of a Ray Data set through a model. Run: pip install "ray[data]"; python examples/ray_data.py"""

from __future__ import annotations

import ray

from rayneuron.batches import Generate


def main() -> None:
    """Three rows through the demo model, in one actor with two cores."""
    ray.init(address="local", include_dashboard=False)
    rows = [{"prompt": text} for text in ("The capital of France is", "1, 2, 3,", "The opposite of hot is")]
    model = {"model": "demo:smollm2", "dtype": "bf16", "max_model_len": 512, "threads": 2, "params": {"temperature": 0, "max_tokens": 8}}
    answered = ray.data.from_items(rows).map_batches(Generate, fn_constructor_kwargs=model, batch_size=64, concurrency=1, num_cpus=1)
    for row in answered.take_all():
        print(repr(row["prompt"]), "->", repr(row["generated_text"]), row["finish_reason"], row["num_generated_tokens"])
    ray.shutdown()


if __name__ == "__main__":
    main()
