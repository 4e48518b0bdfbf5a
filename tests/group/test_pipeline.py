"""Stages and micro-batches: how a step is divided and put together, links between stages, sequence parallelism, and the idle share."""

from __future__ import annotations

import select
import socket
import threading
from pathlib import Path

import pytest
import torch

from rayneuron import wire
from rayneuron.devices.base import LOGITS, StepOutput
from rayneuron.engine.buckets import Capacity, capacity
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.errors import WorkerLost
from rayneuron.group import links, pipeline
from rayneuron.types import Request, SamplingParams
from tests.serve.scripted import eventually

CAPACITY: Capacity = capacity(rows=16, length=256, chunk=128, smallest=64)


def plan(tag: str, counts: list[int], **params: object) -> Plan:
    works = []
    for i, count in enumerate(counts):
        request = Request(id=str(i), prompt_ids=[1] * 40, params=SamplingParams(temperature=0.0, **params))  # type: ignore[arg-type]
        sequence = Sequence(request, 0, [1] * 40, 0, 9, i, prompt_len=40)
        works.append(Work.of(sequence, 40 - count, count))
    return Plan(tag, works)  # type: ignore[arg-type]


def test_rows_are_divided_in_order_and_graphs_exist() -> None:
    from rayneuron.engine.buckets import inventory

    listed = set(inventory(CAPACITY))
    for rows in range(1, 17):
        for wanted in (1, 2, 3, 4, 8):
            whole = plan("decode", [1] * rows)
            parts = pipeline.divide(CAPACITY, whole, 2, wanted)
            assert [w for _, p in parts for w in p.works] == whole.works
            assert len(parts) == min(wanted, rows) and all(shape in listed for shape, _ in parts)
            sizes = [len(p.works) for _, p in parts]
            assert max(sizes) - min(sizes) <= 1 and all(shape.rows >= n for (shape, _), n in zip(parts, sizes, strict=True))


def test_nothing_is_divided_where_it_would_not_pay() -> None:
    assert len(pipeline.divide(CAPACITY, plan("decode", [1] * 16), 2, None)) == 1  # reading the weights four times costs more
    assert len(pipeline.divide(CAPACITY, plan("prefill", [32] * 4), 2, None)) == 4
    assert len(pipeline.divide(CAPACITY, plan("prefill", [32] * 4), 1, None)) == 1
    assert len(pipeline.divide(CAPACITY, plan("prefill", [32] * 4), 1, 4)) == 1


def test_parts_return_what_the_whole_would() -> None:
    """One row that wants logits makes every part return them, so that rows keep their places."""
    whole = plan("prefill", [8, 8, 8])
    whole.works[2].sequence.needs = "logits"
    assert {shape.want for shape, _ in pipeline.divide(CAPACITY, whole, 2, 3)} == {LOGITS}
    first = StepOutput(ids=torch.tensor([[1], [2], [0], [0]]), complete=torch.tensor([True, True, False, False]), logits=torch.ones(4, 3))
    second = StepOutput(ids=torch.tensor([[3]]), complete=torch.tensor([False]), logits=torch.zeros(1, 3))
    out = pipeline.merge([first, second], [2, 1])
    assert out.ids.tolist() == [[1], [2], [3]] and out.complete.tolist() == [True, True, False]  # type: ignore[union-attr]
    assert out.logits.shape == (3, 3) and out.logits[2].sum() == 0  # type: ignore[union-attr]
    greedy = pipeline.merge([StepOutput(ids=torch.tensor([[5]])), StepOutput(ids=torch.tensor([[6], [9]]))], [1, 1])
    assert greedy.ids.tolist() == [[5], [6]] and greedy.complete is None and greedy.logits is None  # type: ignore[union-attr]


def ends(timeout_s: float = 30.0) -> tuple[links.Outgoing, links.Incoming]:
    a, b = socket.socketpair()
    return links.Outgoing(a, "the next"), links.Incoming(b, "the stage before", timeout_s)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_arrive_as_they_were_and_sending_does_not_wait(dtype: torch.dtype) -> None:
    out, into = ends()
    sent = [torch.randn(4, 64, 1024).to(dtype) for _ in range(6)]  # far more than any socket buffer holds
    for x in sent:
        out.send(x)  # nobody has read a byte yet
    for x in sent:
        assert torch.equal(into.receive(torch.empty(4, 64, 1024, dtype=dtype)), x)
    out.close()
    with pytest.raises(WorkerLost, match="the stage before is gone"):
        into.receive(torch.empty(1))
    into.close()


def test_a_link_ends_with_a_name() -> None:
    out, into = ends(0.2)
    with pytest.raises(WorkerLost, match=r"the stage before has sent nothing for 0\.2 s"):
        into.receive(torch.empty(2))
    out.send(torch.ones(3))
    assert select.select([into._socket], [], [], 60)[0], "another thread sends it"
    with pytest.raises(WorkerLost, match="sent 12 bytes where 8 were due"):
        into.receive(torch.empty(2))
    into.abort()

    def noticed() -> bool:
        try:
            out.send(torch.ones(10**5))
        except WorkerLost as error:
            return str(error).startswith("the next: ")
        return False

    eventually(noticed, 60)  # the first may still find room in the buffer
    out.close()
    into.close()


def test_links_want_the_token() -> None:
    with wire.listen("127.0.0.2") as listener:
        stranger = socket.create_connection(listener.getsockname()[:2])
        stranger.sendall(b"\0\0\0\5hello")
        guess = links.dial(wire.address(listener), b"wrong", 1, "me", 5.0)
        true = links.dial(wire.address(listener), b"right", 1, "me", 5.0)
        taken = links.accept(listener, b"right", "rank 0 of stage 0", 60.0, lambda: None)
        assert taken.getpeername() == true.getsockname()
        with pytest.raises(WorkerLost, match=r"rank 0 of stage 0 has not connected within 0\.3 s"):
            links.accept(listener, b"right", "rank 0 of stage 0", 0.3, lambda: None)
        for connection in (stranger, guess, true, taken):
            connection.close()
    with pytest.raises(WorkerLost, match=r"rank 0 of stage 1: tcp:127\.0\.0\.2:1 does not answer"):
        links.dial("tcp:127.0.0.2:1", b"x", 1, "rank 0 of stage 1", 0.1)


class Line:
    """Two stages as threads with real links. Time is counted in ticks, in each of which a stage works on one micro-batch or on none."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.ticks = batches + 1
        self.works = {"first": 0, "second": 0}
        self._tick = threading.Barrier(2, timeout=60)
        self._out, self._into = ends(60.0)

    def idle_share(self) -> float:
        thread = threading.Thread(target=self._second)
        thread.start()
        for tick in range(self.ticks):
            self._tick.wait()
            if tick < self.batches:
                self.works["first"] += 1
                self._out.send(torch.full((4, 64), float(tick)))
            self._tick.wait()
        thread.join()
        self._out.close()
        self._into.close()
        return 1 - sum(self.works.values()) / (2 * self.ticks)

    def _second(self) -> None:
        for tick in range(self.ticks):
            self._tick.wait()
            if tick:  # what was sent in the tick before comes in this one, while the first stage is at the next
                assert self._into.receive(torch.empty(4, 64))[0, 0] == tick - 1
                self.works["second"] += 1
            self._tick.wait()


def test_stages_overlap() -> None:
    """GPipe's (S-1)/(M+S-1) is 20 % for 4 micro-batches on 2 stages."""
    assert Line(4).idle_share() == pytest.approx(0.2)  # (stages - 1) / (micro-batches + stages - 1): GPipe, Huang et al. 2019


def test_the_idle_share_of_real_stages(tiny: Path) -> None:
    """1 - busy / (ranks x time). With one micro-batch never more than one of two stages works, so half is the least, however fast."""
    from rayneuron import LLM, SamplingParams
    from rayneuron.group.group import Group

    options = {"dtype": "fp32", "max_model_len": 128, "max_num_seqs": 4, "threads": 1, "buckets": {"batch": [4], "token_generation": [128]}}
    with LLM(tiny, **options, pipeline_parallel=2, micro_batches=1) as llm:
        group = llm.engine.runner
        assert isinstance(group, Group)
        shares = []
        for _ in range(5):
            group.step_s = group.busy_s = 0.0
            llm.generate([[5, 6, 7] * 20] * 4, SamplingParams(temperature=0.0, max_tokens=8))
            assert 0 < group.busy_s < 2 * group.step_s
            shares.append(group.idle_share)
        # The highest: a rank that has to stand back for another process while its neighbour computes counts that as busy.
        assert 0.5 <= max(shares) < 1, shares
        group.step_s, group.busy_s = 2.0, 3.0
        assert group.idle_share == pytest.approx(0.25)
