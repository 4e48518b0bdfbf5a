"""Dialects: JSON bodies to `types.Request`, and `types.Delta` back to replies and streams. Pure functions, no HTTP, Ray or torch.

All of it runs on the event loop, a few microseconds a token. How the server uses it:

    context = Context(models=("smollm2",), text=text, max_model_len=2048, vocab_size=text.vocab_size, defaults=defaults)  # once a replica
    dialect = routes.SPOKEN["/v1/chat/completions"]
    try:
        body = openai.decode(raw_bytes)  # RequestError 400: bad JSON, bad UTF-8, not an object
        spoken = dialect.choose(body) if dialect.choose else dialect  # a route may have several, told apart by key
        call = spoken.parse(body, context, request_id=rid, created=int(time.time()), client_id=openai.clean_id(header))
    except RayNeuronError as wrong:
        status, reply, headers = spoken.error(errors.error_body(wrong))

* What fails before a dialect is known (a long body, a wrong key, no such method) is said as `routes.shaped(triple, path, method)`.
* `request_id`: unique, made by the server (never the client's). `client_id`: the cleaned X-Request-Id or None; it only shows in the
  reply's `id`. `call.requests`: one `types.Request` a prompt; `call.unknown`: field names nobody here knows, to be logged once.
* Unary: every `Delta` of every request in arrival order, until every choice had a `finish_reason`; then `call.reply(deltas)`.
* Stream: pull the first Delta BEFORE the headers (an exception, or a `delta.error`, is a clean 4xx/5xx then). With
  `stream = call.answer.open(call)` send `stream.first()`, for each Delta `stream.chunk(delta)` (b"": nothing yet) until
  `stream.done`, then `stream.last()`; on an exception after the headers `stream.error(exc)`, and end. A Delta that failed makes
  `chunk` return just that and sets `done` and `failed`.
"""
