"""Live requests and their choices: how they are made, and who of them computes the prompt that all of them share."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable

from rayneuron.devices.base import POOLED, SCORES
from rayneuron.engine.beams import Search
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.logits import EditRules, Edits
from rayneuron.engine.remote import Loan
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams


class Requests(dict[str, dict[int, Sequence]]):
    """Choices by index, by request. Belongs to the engine's thread; any may ask whether an id is in it.

    `length`: positions of a sequence; `eos_ids`: the model's.
    """

    def __init__(self, length: int, eos_ids: frozenset[int]) -> None:
        super().__init__()
        self._length = length
        self._eos_ids = eos_ids
        self._order = 0
        self._rules: deque[EditRules] = deque(maxlen=2)  # the last ones that were laid out

    def open(self, request: Request, now_s: float, loan: Loan | None = None) -> Sequence:
        """Make the choices of a request; the one that leads. Of a `loan` each ends with its first token, whatever its parameters say."""
        seed = request.params.seed if request.seed is None else request.seed
        request.seed = seed = secrets.randbits(62) if seed is None else seed  # whoever else goes on with it draws the same
        prompt, most = len(request.prompt_ids), request.params.max_tokens
        said = request.params.structured_outputs
        constrained = said is not None and said.kind != ""  # it may come to where nothing but an end is left
        eos_ids = frozenset() if request.params.ignore_eos and not constrained else self._eos_ids
        rules = self._laid_out(request.params)
        choices: dict[int, Sequence] = {}
        for index in range(request.params.n if request.params.beams is None else 1):
            choice = Sequence(
                request,
                index,
                [*request.prompt_ids, *request.output_ids],
                seed + index,
                1 if loan is not None else self._length - prompt if most is None else most,
                self._order,
                leader=choices.get(0),
                prompt_len=prompt,
                phase="follows",
                eos_ids=eos_ids,
                stop_ids=eos_ids | frozenset(request.params.stop_token_ids),
                loan=loan,
            )
            choice.edits = None if rules is None else Edits(choice, rules)
            if request.params.beams is not None:
                choice.search = Search(choice, choice.stop_ids)
            choice.stamps.arrived = request.arrival_s or now_s
            self._order += 1
            choices[index] = choice
        if request.params.prompt_logprobs is not None:
            choices[0].prompt_logprobs = [None]
        self[request.id] = choices
        return choices[0]

    def late(self, now_s: float) -> tuple[list[str], bool]:
        """Requests whose deadline has passed; and whether any has one."""
        timed = [(request_id, next(iter(choices.values())).request.deadline_s) for request_id, choices in self.items()]
        return [name for name, until_s in timed if until_s is not None and now_s > until_s], any(s is not None for _, s in timed)

    def followers(self, request_id: str) -> list[Sequence]:
        """Choices that wait for the prompt's KV."""
        return [choice for choice in self.get(request_id, {}).values() if choice.phase == "follows"]

    def close(self, choice: Sequence) -> Sequence | None:
        """Forget a choice that has ended. Where it was to compute the prompt for others, the one that does so now: the next."""
        choices = self[choice.request.id]
        del choices[choice.index]
        if not choices:
            del self[choice.request.id]
            return None
        heir = next(iter(choices.values()))
        if heir.phase != "follows":
            return None
        for other in choices.values():
            other.leader = None if other is heir else heir
        return heir

    def check(self, planned: Iterable[Sequence]) -> None:
        """Raise AssertionError where a sequence is planned that is not of a request here, or a request has no choices."""
        known = {id(s) for choices in self.values() for s in choices.values()}
        assert {id(s) for s in planned} <= known, "a sequence runs that no request owns"
        assert all(self.values()), "a request without choices was kept"

    def _laid_out(self, params: SamplingParams) -> EditRules | None:
        """What the host has to do to this request's logits."""
        if not params.edits_logits:
            return None
        rules = next((rules for rules in self._rules if rules.params is params), None)
        if rules is None:
            rules = EditRules(params)
            self._rules.append(rules)
        return rules


def check_room(request: Request, capacity: Capacity) -> None:
    """Raise RequestError for a request that there are no graphs for, or not the rows and blocks for all its beams at once."""
    params, beams, block = request.params, request.params.beams, capacity.block
    asked = ((params.prompt_logprobs, SCORES, "prompt_logprobs", "scores"), (request.pooling, POOLED, "embeddings", "embeddings"))
    for said, want, name, key in asked:
        if said is not None and want not in capacity.wants:
            raise RequestError(f"this deployment has no graphs for {name}; its file must say buckets.{key}: true", param=name)
    if beams is None:
        return
    if beams.width > capacity.rows:
        at_once = f"{capacity.rows} sequences that run at once (max_num_seqs)"
        raise RequestError(f"a beam search of width {beams.width} does not fit the {at_once}", param="beams")
    prompt = len(request.prompt_ids)
    most = capacity.length if params.max_tokens is None else prompt + params.max_tokens
    blocks = prompt // block + beams.width * (-(-most // block) - prompt // block)
    if blocks > capacity.blocks:
        need = f"{beams.width} beams of {most} tokens need {blocks} blocks of KV"
        raise RequestError(f"{need} and there are {capacity.blocks}; ask for fewer tokens", param="max_tokens")
