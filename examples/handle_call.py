"""Call a served model from another Ray application, without HTTP: `rayneuron serve deployments/handle_call.yaml`.

    curl localhost:8000/caller -d '{"prompt": "The sea is", "max_tokens": 16}' -H 'content-type: application/json'
"""

from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request

from rayneuron.serve.caller import Stream


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Caller:
    """Asks a chat whole, and streams a completion token by token. `application`: the name of the model's Serve application."""

    def __init__(self, application: str) -> None:
        self._model = serve.get_app_handle(application)

    async def __call__(self, request: Request) -> dict[str, Any]:
        asked = await request.json()
        limit = {"max_tokens": asked.get("max_tokens", 16)}
        chat = await self._model.chat.remote({"messages": [{"role": "user", "content": asked["prompt"]}], **limit})
        pieces = []
        async for piece in Stream(self._model.generate, asked["prompt"], {"temperature": 0, **limit}):
            pieces.append(piece["text"])
        return {"chat": chat, "streamed": "".join(pieces), "pieces": len(pieces)}


def build(args: dict) -> Application:
    """`args`: {"application": NAME}."""
    return Caller.bind(args["application"])
