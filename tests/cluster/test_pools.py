"""Pools on two nodes: KV goes from one to the other, whose loss in the middle costs time and no text, and that comes back by itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from rayneuron import LLM, SamplingParams
from tests.cluster.conftest import Cluster, deploy, status
from tests.serve.scripted import eventually
from tests.serve.test_pools_app import ARGUMENTS, PROMPTS, counted, streamed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_node_that_prefills_is_lost(clean: Cluster, tiny: Path) -> None:
    whole = {"serving": {"num_cpus": float(clean.cpus), "drain_timeout_s": 5}}  # a node's, so that each pool is on one of its own
    pools = {"local_tokens": 0, "stall_s": 2.0, "prefill": whole}
    args = {"model": {"path": str(tiny), "name": "tiny"}, **ARGUMENTS, **whole, "pools": pools}
    with LLM(str(tiny), dtype="fp32", max_model_len=512, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        expected = [llm.generate([prompt], params)[0].outputs[0].text for prompt in PROMPTS]
    assert deploy(clean, args) == "RUNNING", status()
    home = {clean.node_of(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in clean.replicas}
    assert len(home) == 2, home
    (there,) = [node for node, words in home.items() if b"PrefillServer" in words]
    numbers = iter(range(1000))
    with httpx.Client(base_url=clean.url, timeout=60) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:

        def moved() -> float:
            streamed(client, f"{next(numbers)} prompts that nobody has seen before, and that are long enough to be asked for elsewhere")
            return counted(client, "rayneuron:kv_transfer_bytes_total")

        eventually(lambda: moved() > 0, 60)
        assert list(threads.map(lambda prompt: streamed(client, prompt), PROMPTS)) == expected
        seen = counted(client, "rayneuron:kv_transfer_bytes_total")
        running = [threads.submit(streamed, client, "Once more. " + prompt) for prompt in PROMPTS]
        clean.kill_node(there)
        texts = [one.result() for one in running]
        assert [streamed(client, "Once more. " + prompt) for prompt in PROMPTS] == texts, "each as if nothing had happened"
        clean.start_worker_node(there)
        eventually(lambda: moved() > seen, 180, status)
