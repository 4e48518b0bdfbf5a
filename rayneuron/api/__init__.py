"""Dialects: JSON bodies to `types.Request`, and `types.Delta` back to JSON replies and SSE bytes. Pure functions.

How the server uses it (no HTTP, no Ray, no torch in here; all of it runs on the event loop, a few microseconds a token):

    from rayneuron.api import errors, neuron_server, openai
    from rayneuron.api.call import Context

    defaults = openai.sampling_defaults(generation_config, user_config)  # ConfigError if one is wrong
    context = Context(models=("smollm2",), text=text, max_model_len=2048, vocab_size=text.vocab_size, defaults=defaults)  # once a replica

    try:
        body = openai.decode(raw_bytes)  # RequestError 400: bad JSON, bad UTF-8, not an object
        call = openai.parse_chat(body, context, request_id=rid, created=int(time.time()), client_id=openai.clean_id(header))
        # or openai.parse_completions(...), neuron_server.parse(...): the same signature, the same kind of result
    except RayNeuronError as wrong:
        status, reply, headers = errors.error_body(wrong)  # OpenAI's error object, Retry-After where a retry helps

* `request_id`: unique, made by the server (never the client's). `client_id`: the cleaned X-Request-Id or None; it only shows in the
  reply's `id`, and the server echoes the header. Two calls with the same client id never collide.
* `call.requests`: one `types.Request` a prompt, ids `<request_id>-<place>`; set `arrival_s` and `deadline_s` on them, make one
  `text.Assembler(request, text)` each and submit them.
* `call.unknown`: field names nobody here knows; accepted, log each name once a process.
* `call.head.stream`: the client wants a stream. `call.choices`: choices over all prompts.

Unary: collect every `Delta` of every request in arrival order until `call.choices` of them had a `finish_reason`, then
`errors.encode(call.reply(deltas))` is the body; `reply` raises the RayNeuronError of a delta that carries an error.

Stream: pull the first Delta BEFORE the headers (an exception, or a `delta.error`, is a clean 4xx/5xx then).
`stream = openai.Events(call)`; send `stream.first()`; for each Delta send `stream.chunk(delta)` (b"": nothing to send yet) until
`stream.done`; send `stream.last()`. On an exception after the headers send `stream.error(exc)` (error event and `[DONE]`) and end. A
Delta with `finish_reason` "error" makes `chunk` return just that and sets `done` and `failed` (`last()` is b"" then): abort the call's
other requests.
`stream.content_type` is "text/event-stream".

Others, all dicts: `openai.models_list(cards)`, `model_card(...)`, `find_model(name, cards)` (UnknownModel 404), `tokenize(body, context)`,
`detokenize(body, context)`, `tokenizer_info(context)`, `version(number)`. `errors.error_reply(status, message, param=None)` gives the
same triple for what has no exception (404 route, 405, 415, 401). `POST /generate`: `neuron_server.parse`; a body with `messages` goes to
chat, with `prompt` to the note's shape; `inputs` will be TGI's (refused by name until then).
"""
