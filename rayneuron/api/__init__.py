"""Dialects: JSON bodies to `types.Request`, and `types.Delta` back to JSON replies and SSE bytes. Pure functions.

How the server uses it (no HTTP, no Ray, no torch in here; everything runs on the event loop thread, a few microseconds a token):

    from rayneuron.api import openai, neuron_server, errors
    from rayneuron.api.call import Context

    context = Context(models=("smollm2",), text=text, max_model_len=2048, vocab_size=text.vocab_size,
                      defaults=openai.sampling_defaults(generation_config, user_config))   # once a replica; ConfigError if a default is wrong

    try:
        body = openai.decode(raw_bytes)                                  # RequestError 400 on bad JSON, bad UTF-8, not an object
        call = openai.parse_chat(body, context, request_id=rid, created=int(time.time()), client_id=header)
             # or openai.parse_completions(...), neuron_server.parse(...): the same signature, the same kind of result
    except RayNeuronError as wrong:
        status, reply, headers = errors.error_body(wrong)                # OpenAI's error object, Retry-After where a retry helps

* `request_id`: unique, made by the server (never the client's). `client_id`: `openai.clean_id(x_request_id_header)` or None; it only shows in the reply's `id`,
  and the header is echoed by the server. Two calls with the same client id never collide.
* `call.requests`: one `types.Request` a prompt, ids `<request_id>-<i>`; set `arrival_s`, `deadline_s` on them, make one `text.Assembler(request, text)` each and submit them.
* `call.unknown`: field names nobody here knows; accepted, log each name once a process.
* `call.stream`, `call.choices` (number of choices over all prompts).

Unary:   collect every `Delta` of every request in arrival order, stop after `call.choices` of them had a `finish_reason`, then
         `reply = call.reply(deltas)` -> dict (raises the RayNeuronError if a delta carries an error) and `errors.encode(reply)` -> bytes.
Stream:  pull the first Delta BEFORE the headers (an exception or `delta.error` there is a clean 4xx/5xx: `errors.failed(delta)` gives the exception or None), then
         `stream = call.open()`; send `stream.first()`; for each Delta send `stream.chunk(delta)` (b"" means nothing to send yet) until `stream.done`; send `stream.last()`.
         An exception after the headers: send `stream.error(exc)` and end; it holds the error event and `[DONE]`. A Delta with `finish_reason` "error" makes
         `chunk` return exactly that and sets `done` and `failed`; then send nothing more and abort the call's other requests. `stream.content_type` is "text/event-stream".
Others:  `openai.models_list(cards)`, `openai.model_card(...)`, `openai.find_model(name, cards)` (UnknownModel 404), `openai.tokenize(body, context)`,
         `openai.detokenize(body, context)`, `openai.tokenizer_info(context)`, `openai.version(version)` -> dict.
         `errors.error_reply(status, message, param=None)` -> the same triple for what has no exception (404 route, 405, 415, 401).
`POST /generate`: `neuron_server.parse`; a body with `messages` goes to chat, with `prompt` to the note's shape; `inputs` will be TGI's (refused by name until then).
"""
