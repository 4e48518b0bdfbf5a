"""Batch files and rows of a table against the server's own answers; runs cut short and gone on with; files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayneuron import LLM, batches
from rayneuron.batches import Generate
from rayneuron.cli import main
from rayneuron.errors import ConfigError
from tests.serve.real import serving

SAYS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"dtype": "fp32", "max_model_len": 128, "max_num_seqs": 4, "threads": 1, "served_model_name": "tiny"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello there", "n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 5}),
    ("/v1/completions", {"prompt": ["one", "two"], "logprobs": 2, **SAYS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **SAYS}),
    ("/v1/responses", {"input": "Hi", "temperature": 0, "max_output_tokens": 5}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/completions", {"prompt": "x", "model": "another"}),
    ("/v1/messages", {"model": "tiny", "messages": [], "max_tokens": 5}),
]
LINES = [{"custom_id": f"line {i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(BODIES)]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, tuple[int, Any]]:
    made = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in made}) == len(made) and all(line["error"] is None for line in made)
    answers = {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in made}
    assert len(answers) == len(made), "one answer each"
    return answers


def bare(said: Any) -> Any:
    """Without what differs from call to call: ids and clocks."""
    if isinstance(said, dict):
        return {k: bare(v) for k, v in said.items() if k not in ("id", "created", "created_at", "completed_at", "item_id")}
    return [bare(v) for v in said] if isinstance(said, (list, tuple)) else said


@pytest.fixture
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **OPTIONS) as made:
        yield made


async def test_every_line_is_answered_as_by_the_server(tiny: Path, tmp_path: Path, llm: LLM) -> None:
    source, target = written(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    assert batches.run(llm, batches.lines(source), target) == (8, 3, 0)
    answers = read(target)
    async with serving(tiny, max_model_len=128) as served:
        for line in LINES:
            answer = await served.post(line["url"], json.dumps(line["body"]).encode())
            assert bare([answer[0], json.loads(answer[1])]) == bare(answers[line["custom_id"]]), line
    llm.engine.check_ledger()


def test_a_run_cut_short_is_gone_on_with(tmp_path: Path, llm: LLM) -> None:
    source, target = written(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    batches.run(llm, batches.lines(source), target)
    whole = read(target)
    kept = target.read_bytes().splitlines(keepends=True)[:3]
    target.write_bytes(b"".join(kept) + b'{"id": "batch_req_1", "custom_id": "line 7", "resp')
    assert batches.run(llm, batches.lines(source), target).before == 3
    assert target.read_bytes().startswith(b"".join(kept))
    assert bare(read(target)) == bare(whole)
    before = target.read_bytes()
    assert batches.run(llm, batches.lines(source), target) == (0, 0, 8) and target.read_bytes() == before


def test_more_lines_than_rows(tmp_path: Path, llm: LLM) -> None:
    many = [{**LINES[1], "custom_id": str(i), "body": {"prompt": f"{i} is", **SAYS}} for i in range(40)]
    assert batches.run(llm, batches.lines(written(tmp_path / "in", many)), tmp_path / "out").answered == 40
    alone = llm.generate([f"{i} is" for i in range(40)], SAYS)
    texts = {name: body["choices"][0]["text"] for name, (_, body) in read(tmp_path / "out").items()}
    assert texts == {str(i): output.outputs[0].text for i, output in enumerate(alone)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "in.jsonl:2: the line is not valid JSON"),
        ("[]", "in.jsonl:2: the line must be a JSON object, got an array"),
        (json.dumps({**LINES[1], "custom_id": 3}), "in.jsonl:2: custom_id must be a text of your own"),
        (json.dumps(LINES[0]), "in.jsonl:2: custom_id 'line 0' is there twice"),
        (json.dumps({**LINES[1], "method": "GET"}), "in.jsonl:2: method must be POST, got 'GET'"),
        (json.dumps({**LINES[1], "url": "/v1/chat"}), "in.jsonl:2: url must be one of /v1/chat/completions, /v1/completions"),
        (json.dumps({**LINES[1], "body": "x"}), "in.jsonl:2: body must be an object"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_a_model_is_loaded(tmp_path: Path, capsys: Any, line: str, says: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    assert main(["batch", str(source), str(tmp_path / "out.jsonl"), "demo:smollm2"]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


def test_an_output_that_holds_something_else_is_kept(tmp_path: Path, llm: LLM) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("dear diary\n")
    with pytest.raises(ConfigError, match=r"notes.txt:1: no line of a batch's answers"):
        batches.run(llm, batches.lines(written(tmp_path / "in", LINES)), target)
    assert target.read_text() == "dear diary\n"


def test_the_command(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    source = written(tmp_path / "in.jsonl", LINES[1:3])
    options = ["--dtype", "fp32", "--max-model-len", "128", "--max-num-seqs", "2"]
    assert main(["batch", str(source), str(tmp_path / "out.jsonl"), str(tiny), *options]) == 0
    assert capsys.readouterr().out.endswith("out.jsonl: 2 of 2 answered, 0 of them refused, 0 known before\n")


def test_rows_of_a_table(tiny: Path, llm: LLM) -> None:
    stage = Generate(str(tiny), params=SAYS, **OPTIONS)
    prompts = ["hello there", "one", ""]
    told = stage({"prompt": np.array(prompts, dtype=object), "max_tokens": np.array([6, 4, 6])})
    wanted = [llm.generate(p, SAYS | {"max_tokens": n})[0].outputs[0] for p, n in (("hello there", 6), ("one", 4))]
    assert told["generated_text"][:2] == [output.text for output in wanted] and told["num_generated_tokens"][:2] == [6, 4]
    assert told["prompt"].tolist() == prompts and told["error"][:2] == ["", ""]
    chats = np.empty(1, dtype=object)
    chats[0] = np.array([{"role": "user", "content": "Hi"}], dtype=object)  # as a table gives a list
    said = stage({"messages": chats})
    assert said["generated_text"] == [llm.chat([{"role": "user", "content": "Hi"}], SAYS)[0].outputs[0].text]
    assert stage({"prompt": ["x"], "temperature": [-1.0]})["error"] == ["temperature must be between 0 and 2, got -1.0"]
