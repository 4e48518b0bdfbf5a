"""Another Ray application that calls every handle method, and tells over HTTP what came back."""

import asyncio
from typing import Any

from ray import serve
from ray.serve import Application

from rayneuron.errors import RayNeuronError
from rayneuron.serve.caller import Stream


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Probe:
    """Calls the model named by `application`."""

    def __init__(self, application: str) -> None:
        self._model = serve.get_app_handle(application)

    async def __call__(self, request: Any) -> dict[str, Any]:
        body = await request.json()
        model = self._model
        out = {
            "completions": await model.completions.remote(body),
            "tokenize": await model.tokenize.remote({"prompt": "hello"}),
            "models": await model.models.remote(),
            "stats": await model.stats.remote(),
            "pieces": [piece async for piece in model.generate.options(stream=True).remote(body)],
        }
        try:
            await model.completions.remote(body | {"temperature": 9})
        except RayNeuronError as wrong:
            out["error"] = [isinstance(wrong, RayNeuronError), wrong.status, wrong.param, wrong.message]
        stream = model.generate.options(stream=True).remote(body | {"max_tokens": 200, "ignore_eos": True})
        await anext(stream)
        stream.cancel()
        while (await model.stats.remote())["open_calls"]:
            await asyncio.sleep(0.01)
        dropped = Stream(model.generate, body | {"max_tokens": 200, "ignore_eos": True, "n": 128, "temperature": 1.0})
        out["first"] = await anext(dropped)
        return out  # and nobody holds it any longer


def build(args: dict) -> Application:
    """`args`: {"application": NAME}."""
    return Probe.bind(args["application"])
