"""OpenAI's `prediction`: a text that the answer may repeat. It makes an answer come sooner, and changes none."""

from __future__ import annotations

from rayneuron.api.call import Context
from rayneuron.api.fields import Fields, wrong


def read_prediction(fields: Fields, context: Context) -> list[int] | None:
    """Its token ids, as many as an answer can have."""
    said = fields.table("prediction")
    if said is None:
        return None
    if said.get("type") != "content":
        wrong("prediction.type", "content", said.get("type"))
    parts = said.get("content")
    if not isinstance(parts, list):
        parts = [{"type": "text", "text": parts}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            wrong("prediction.content", "a string, or an array of {type: text, text: ...}", said.get("content"))
    text = "".join([part["text"] for part in parts])
    length = context.max_model_len
    return context.text.encode(text, add_special_tokens=False, limit=length, side="right")[:length]
