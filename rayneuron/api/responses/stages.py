"""The events in which a response comes into being: its items one after another, each opened, filled and closed."""

from __future__ import annotations

from functools import partial

from rayneuron.api.call import Answer, Call, Json
from rayneuron.api.errors import error_body
from rayneuron.api.responses.reply import OPEN, Items, logprobs, part, reply, response, status_of
from rayneuron.api.scan import Event, Scanner
from rayneuron.api.stream import Mould, Single, named_event
from rayneuron.types import Delta, TokenLogprobs

# What an item's text is called in events.
TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def answer(shell: Json) -> Answer:
    """How a call is answered. `shell`: what of the body the response repeats."""
    return Answer(partial(reply, shell), partial(_Stages, shell))


class _Stages(Single):
    """The states of a response: created, in progress, its items, and how it ended. A plain text's message is open from the start."""

    def __init__(self, shell: Json, call: Call) -> None:
        super().__init__(call)
        self._shell = shell
        self._number = 0
        self._scanner, self._items = Scanner(call.scan), Items(call)
        self._entries: list[TokenLogprobs] = []
        self._more: Mould | None = None  # of the item that is open, more text and nothing else

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _event(self, stage: str, **said: object) -> bytes:
        return _told(stage, self._next(), **said)

    def first(self) -> bytes:
        """Everything before the first token."""
        begun = response(self._shell, self.call, OPEN, [], None)
        out = self._event("created", response=begun) + self._event("in_progress", response=begun)
        return out if self.call.scan.on else out + self._part(Event("content", ""), ())

    def write(self, delta: Delta) -> bytes:
        """Parts of items; at last the response."""
        self._entries += delta.logprobs or ()
        events = self._scanner.push(delta.text, last=self.done)
        if not events and delta.logprobs and not self.call.scan.on:
            events = [Event("content", "")]
        out = b"".join([self._part(event, delta.logprobs or ()) for event in events])
        if not self.done:
            return out
        if not self._items.kept:
            out += self._part(Event("content", ""), ())
        status = status_of(delta.finish_reason)
        output = self._items.closed(status, self._entries)
        whole = response(self._shell, self.call, status, output, self.tally.usage())
        return out + self._close() + self._event(status, response=whole)

    @property
    def _place(self) -> Json:
        return {"item_id": self._items.kept[-1]["id"], "output_index": len(self._items.kept) - 1}

    def _part(self, event: Event, entries: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> bytes:
        """The events of a part of an item."""
        before = list(self._items.kept)
        begins = self._items.add(event)
        item = self._items.kept[-1]
        kind, out = item["type"], b""
        if begins:
            self._more = None
            if before:
                before[-1]["status"] = "completed"
                out += self._close_item(before[-1], len(before) - 1)
            out += self._event("output_item.added", output_index=len(before), item=self._items.empty(kind, len(before), event.name))
            if kind != "function_call":
                out += self._event("content_part.added", part=part(self.call, kind, "", ()), content_index=0, **self._place)
        if not event.text and not entries:
            return out
        if self._more is None or entries:
            name, place = f"{TEXTS[kind]}.delta", self._place if kind == "function_call" else {"content_index": 0, **self._place}
            shown = {"logprobs": logprobs(self.call, entries)} if kind == "message" else {}
            if entries:
                return out + self._event(name, delta=event.text, **shown, **place)
            self._more = Mould(_told(name, Mould.MARK, **shown, **place, delta=Mould.MARK), 2)
        return out + self._more.fill(self._next(), event.text)

    def _close(self) -> bytes:
        return self._close_item(self._items.kept[-1], len(self._items.kept) - 1)

    def _close_item(self, item: Json, index: int) -> bytes:
        """An item, closed from the inside out."""
        kind, place = item["type"], {"item_id": item["id"], "output_index": index}
        if kind == "function_call":
            out = self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"], **place)
        else:
            inside, place = item["content"][0], {**place, "content_index": 0}
            shown = {"logprobs": inside["logprobs"]} if kind == "message" else {}
            out = self._event(f"{TEXTS[kind]}.done", text=inside["text"], **shown, **place)
            out += self._event("content_part.done", part=inside, **place)
        return out + self._event("output_item.done", output_index=index, item=item)

    def torn(self, wrong: BaseException) -> bytes:
        """The response as failed."""
        said = error_body(wrong)[1]["error"]["message"]
        failed = response(self._shell, self.call, "failed", [], self.tally.usage())
        return self._event("failed", response={**failed, "error": {"code": "server_error", "message": said}})


def _told(stage: str, number: object, **said: object) -> bytes:
    return named_event(f"response.{stage}", {"type": f"response.{stage}", "sequence_number": number, **said})
