"""The dialect of SageMaker's containers: one route for bodies of three dialects, models by path, and headers that say more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rayneuron.api import lmi, openai
from rayneuron.api.call import Dialect, Json
from rayneuron.api.errors import Triple
from rayneuron.errors import RequestError, UnknownModel

HEADERS = "x-amzn-sagemaker-"
KINDS = {400: "BadRequestException", 404: "ModelNotFoundException", 409: "ConflictStatusException", 507: "InsufficientStorageException"}
MANAGED = "models cannot be {verb} here: the deployment file says which there are (args.model, or models of a gateway)"


def _choose(body: Json) -> Dialect:
    """By key, as the containers of LMI and vLLM do."""
    for name, dialect in (("messages", openai.CHAT), ("prompt", openai.COMPLETIONS), ("inputs", lmi.INFERENCE)):
        if body.get(name) is not None:
            return dialect
    raise RequestError("the body needs inputs (a text), prompt (a text) or messages (a chat)", param="inputs")


def _head(params: Mapping[str, str], header: Callable[[str], str | None]) -> Json:
    """What the path and SageMaker's headers say: the model and the adapter. Sessions are refused by name."""
    if header(HEADERS + "session-id"):
        raise RequestError("this server keeps no sessions; leave X-Amzn-SageMaker-Session-Id out", param="X-Amzn-SageMaker-Session-Id")
    named, adapter = params.get("model") or header(HEADERS + "target-model"), header(HEADERS + "adapter-identifier")
    return ({} if named is None else {"model": named}) | ({} if adapter is None else {"adapters": adapter})


INVOCATIONS = Dialect(openai.parse_chat, lmi.error, _choose, _head)


def models(names: Iterable[str], root: str) -> Json:
    """`/models`: what is served, as the containers list it."""
    return {"models": [{"modelName": name, "modelUrl": root, "status": "READY"} for name in names]}


def model(name: str, names: Iterable[str], root: str) -> list[Json]:
    """`/models/{name}`. UnknownModel (404) where it is not served."""
    if name not in (there := list(names)):
        raise UnknownModel.named(name, there)
    return [{"modelName": name, "modelUrl": root, "modelVersion": None, "models": [{"modelName": name, "modelUrl": root}]}]


def unmanaged(verb: str) -> RequestError:
    """Why a model is neither loaded nor unloaded here."""
    return RequestError(MANAGED.format(verb=verb), param="models")


def error(triple: Triple) -> Triple:
    """Of what manages models: the server's own {code, type, message}."""
    status, body, headers = triple
    return status, {"code": status, "type": KINDS.get(status, body["error"]["type"]), "message": body["error"]["message"]}, headers
