"""What users' own programs do with a server, a function a client; run by the clients' interpreter: programs.py NAME URL MODEL_DIR.

Prints one JSON object: `version` of the client, and what it was told by the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SAY = [{"role": "user", "content": "Name three colours."}]
ASK = {"messages": SAY, "max_tokens": 12, "temperature": 0.0}
MODEL = "tiny"


def openai(url: str, path: str) -> dict[str, Any]:
    from openai import AsyncOpenAI, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)
    unary = client.chat.completions.create(model=MODEL, **ASK)
    raw = client.chat.completions.with_raw_response.create(model=MODEL, **ASK)
    stream = client.chat.completions.create(model=MODEL, stream=True, stream_options={"include_usage": True}, **ASK)
    events = list(stream)
    with client.chat.completions.stream(model=MODEL, **ASK) as helper:
        for _ in helper:
            final = helper.current_completion_snapshot
    response = client.responses.create(model=MODEL, input="Name three colours.", max_output_tokens=12, temperature=0)
    with client.responses.stream(model=MODEL, input="Name three colours.", max_output_tokens=12, temperature=0) as parts:
        responded = "".join(part.delta for part in parts if part.type == "response.output_text.delta")

    async def later() -> str | None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as other:
            return (await other.chat.completions.create(model=MODEL, **ASK)).choices[0].message.content

    text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    return {
        "chat": [
            unary.choices[0].message.content, raw.parse().choices[0].message.content,
            "".join(e.choices[0].delta.content or "" for e in events if e.choices), final.choices[0].message.content,
            asyncio.run(later()), response.output_text, responded,
        ],
        "text": [text.choices[0].text], "usage": [events[-1].usage.completion_tokens, unary.usage.completion_tokens],
        "models": [m.id for m in client.models.list()],
    }  # fmt: skip


def anthropic(url: str, path: str) -> dict[str, Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", _strict_response_validation=True)
    ask = {"messages": SAY, "max_tokens": 12, "extra_body": {"temperature": 0}}
    unary = client.messages.create(model=MODEL, **ask)
    with client.messages.stream(model=MODEL, **ask) as stream:
        parts = "".join(stream.text_stream)
        final = stream.get_final_message()
    count = client.messages.count_tokens(model=MODEL, messages=SAY)
    return {"chat": [unary.content[0].text, parts, final.content[0].text], "usage": [unary.usage.output_tokens, final.usage.output_tokens],
            "input": [count.input_tokens, unary.usage.input_tokens]}  # fmt: skip


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}


def openai_tools(url: str, path: str) -> dict[str, Any]:
    """A call that is forced, in a stream and whole, and its result passed back: chat and Responses."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    ask = {"model": MODEL, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90, "temperature": 0}
    message = client.chat.completions.create(messages=SAY, **ask).choices[0].message
    with client.chat.completions.stream(messages=SAY, **ask) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    back = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = client.chat.completions.create(messages=[*SAY, message.to_dict(), back], **ask).choices[0].message
    given = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]
    other = {"model": MODEL, "tools": given, "tool_choice": "required", "max_output_tokens": 90, "temperature": 0}
    other |= {"parallel_tool_calls": False}
    (item,) = client.responses.create(input="Name three colours.", **other).output
    with client.responses.stream(input="Name three colours.", **other) as events:
        for _ in events:
            pass
        (final,) = events.get_final_response().output
    items = [{"role": "user", "content": "Name three colours."}, item.to_dict()]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}]
    (more,) = client.responses.create(input=items, **other).output
    told = [message, streamed, again]
    return {"calls": [[c.function.name, c.function.arguments] for m in told for c in m.tool_calls]
            + [[i.name, i.arguments] for i in (item, final, more)]}  # fmt: skip


def anthropic_tools(url: str, path: str) -> dict[str, Any]:
    """The same of Messages."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", _strict_response_validation=True)
    ask = {"model": MODEL, "max_tokens": 90, "tools": [{"name": "weather", "input_schema": CITY}], "extra_body": {"temperature": 0}}
    ask |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = client.messages.create(messages=SAY, **ask)
    with client.messages.stream(messages=SAY, **ask) as stream:
        streamed = stream.get_final_message()
    (block,) = message.content
    assert message.stop_reason == streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    turn = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(messages=[*SAY, *turn], **ask)
    return {"calls": [[each.name, json.dumps(each.input)] for told in (message, streamed, again) for each in told.content]}


def huggingface_hub(url: str, path: str) -> dict[str, Any]:
    from huggingface_hub import InferenceClient

    chat = InferenceClient(base_url=url)
    unary = chat.chat_completion(model=MODEL, **ASK)
    parts = [part.choices[0].delta.content or "" for part in chat.chat_completion(model=MODEL, stream=True, **ASK) if part.choices]
    tgi = InferenceClient(model=url)
    said = tgi.text_generation("The capital of France is", max_new_tokens=8, details=True)
    told = "".join(tgi.text_generation("The capital of France is", max_new_tokens=8, stream=True))
    return {"chat": [unary.choices[0].message.content, "".join(parts)], "text": [said.generated_text, told],
            "usage": [said.details.generated_tokens]}  # fmt: skip


def langchain_openai(url: str, path: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=12, temperature=0)
    said = chat.invoke(SAY[0]["content"])
    parts = "".join(part.content for part in chat.stream(SAY[0]["content"]))
    text = OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=8, temperature=0).invoke("The capital of France is")
    return {"chat": [said.content, parts], "usage": [said.usage_metadata["output_tokens"]], "text": [text]}


def litellm(url: str, path: str) -> dict[str, Any]:
    import litellm

    to = {"api_base": f"{url}/v1", "api_key": "none"}
    said = litellm.completion(model=f"openai/{MODEL}", **ASK, **to)
    parts = [p.choices[0].delta.content or "" for p in litellm.completion(model=f"openai/{MODEL}", stream=True, **ASK, **to)]
    claude = litellm.completion(model=f"anthropic/{MODEL}", **ASK, api_base=url, api_key="none")
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", max_tokens=8, temperature=0, **to
    )
    return {"chat": [said.choices[0].message.content, "".join(parts), claude.choices[0].message.content], "text": [text.choices[0].text],
            "usage": [said.usage.completion_tokens]}  # fmt: skip


def instructor(url: str, path: str) -> dict[str, Any]:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, ConfigDict

    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")  # else the schema allows more, and so small a model goes on
        name: str
        age: int

    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    ask = [{"role": "user", "content": "Ada is 36 years old. Who is that?"}]
    person = client.chat.completions.create(model=MODEL, messages=ask, response_model=Person, max_retries=0, temperature=0, max_tokens=100)
    return {"person": [person.name, person.age]}


def outlines(url: str, path: str) -> dict[str, Any]:
    import outlines
    from openai import OpenAI
    from pydantic import BaseModel

    class Town(BaseModel):
        name: str
        people: int

    model = outlines.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), MODEL)
    said = model("Describe Paris as JSON.", Town, max_tokens=100, temperature=0)
    served = outlines.from_vllm(OpenAI(base_url=f"{url}/v1", api_key="none"), MODEL)
    chosen = served("Is Paris a town? Answer:", outlines.types.Choice(["yes", "no"]), max_tokens=10, temperature=0)
    return {"town": list(Town.model_validate_json(said).model_dump()), "chosen": [chosen]}


def lm_eval(url: str, path: str) -> dict[str, Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model=MODEL, tokenizer=path, tokenizer_backend="huggingface", num_concurrent=1, max_length=512
    )
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " London"), ("1, 2, 3,", " 4")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return {"pairs": pairs, "scores": [list(score) for score in model.loglikelihood(asked)]}


def guidellm(url: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run(
            *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}", "--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=4", "--tokenizer", f"kind=hf_auto,model={path}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={folder}/report.json"),
            "--disable-console",
        )
        report = json.loads((Path(folder) / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    return {"requests": [totals["successful"], totals["errored"]]}


def aiperf(url: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run(
            *("aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", path),
            *("--concurrency", "2", "--request-count", "4", "--isl", "32", "--osl", "8", "--artifact-dir", folder, "--ui", "none"),
        )
        report = json.loads(next(Path(folder).rglob("profile_export_aiperf.json")).read_text())
    return {"requests": [int(report["request_count"]["avg"]), int((report.get("error_request_count") or {"avg": 0})["avg"])]}


def locust(url: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "locustfile.py"
        file.write_text(
            f"from locust import HttpUser, task\nclass User(HttpUser):\n    @task\n    def ask(self):\n"
            f"        self.client.post('/v1/chat/completions', json={json.dumps({'model': MODEL, **ASK})})\n"
            f"        if self.environment.stats.total.num_requests >= 4:\n            self.environment.runner.quit()\n"
        )
        said = run("locust", "-f", str(file), "--headless", "-u", "2", "-r", "2", "-t", "200s", "--host", url, "--json")
    (total,) = json.loads(said)
    return {"requests": [total["num_requests"], total["num_failures"]]}


def boto3(url: str, path: str) -> dict[str, Any]:
    import boto3
    from botocore.config import Config

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
    client = boto3.client("sagemaker-runtime", endpoint_url=url, config=Config(retries={"max_attempts": 1}), **keys)
    chat = client.invoke_endpoint(EndpointName="one", Body=json.dumps({"model": MODEL, **ASK}), ContentType="application/json")
    lmi = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}
    text = client.invoke_endpoint(EndpointName="one", Body=json.dumps(lmi), ContentType="application/json")
    return {
        "chat": [json.loads(chat["Body"].read())["choices"][0]["message"]["content"]],
        "text": [json.loads(text["Body"].read())["generated_text"]],
    }


def run(command: str, *arguments: str) -> str:
    done = subprocess.run([str(Path(sys.executable).with_name(command)), *arguments], capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise SystemExit(f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    client.__name__: client
    for client in (openai, anthropic, huggingface_hub, langchain_openai, litellm, instructor, outlines)
    + (lm_eval, guidellm, aiperf, locust, boto3, openai_tools, anthropic_tools)
}

if __name__ == "__main__":
    name, target, folder = sys.argv[1:]
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
    if name not in ("huggingface_hub", "aiperf"):  # which then take neither a server nor a folder of one's own
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    print(json.dumps({"version": version(name.removesuffix("_tools").replace("_", "-")), **CLIENTS[name](target, folder)}))
