"""The offline engine against transformers: greedy text and logprobs, sampling shapes, streaming, the HF adapter."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rayneuron import LLM, SamplingParams
from rayneuron.errors import CheckpointError, ConfigError, RequestError
from rayneuron.hf import HuggingFaceGenerationAdapter

WORDS = "The quick brown fox jumps over the lazy dog while seven wizards quietly boil a large copper kettle of tea . ".split()


def words(count: int) -> str:
    return " ".join(WORDS[i % len(WORDS)] for i in range(count))


PROMPTS = [
    "The capital of France is",
    "1, 2, 3,",
    "Hello",
    "a",
    "def add(a, b):",
    "Once upon a time",
    "東京は日本の首都です。",
    "你好,世界!今天天气",
    "안녕하세요, 저는",
    "สวัสดีครับ",
    "नमस्ते दुनिया",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 family 🎉🎉",
    "🙂",
    "ďáblův žluťoučký kůň",
    "\n\n\t  indented",
    "    return x",
    "<html><body>",
    '{"key": [1, 2,',
    "SELECT * FROM users WHERE",
    "x = 3.14159; y =",
    "Q: What is 2+2?\nA:",
    "The mitochondria is the",
    "To be, or not to be,",
    "import numpy as np\n\n",
    "The opposite of hot is",
    "My favourite colour is",
    "In 1969, humans first",
    "Water boils at",
    "Roses are red,",
    "Dear Sir or Madam,",
    "E = mc",
    "The quick brown fox",
    "Breaking news:",
    "Step 1:",
    *(words(n) for n in (20, 25, 56, 57, 112)),
]
LONGER = [words(n) for n in (24, 26, 40, 55, 90, 110, 111, 113, 114, 230, 245)]


@pytest.fixture(scope="module")
def demo():
    from rayneuron.demo import ensure

    return ensure("smollm2")


@pytest.fixture(scope="module")
def llm(demo):
    with LLM(demo, dtype="fp32", max_model_len=2048, max_num_seqs=4, threads=1) as made:
        yield made
        made.engine.check_ledger()
        snapshot = made.engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_tokens_used) == (0, 0, 0)


@pytest.fixture(scope="module")
def reference(demo):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(demo)


def expected(reference, ids: list[int], new: int) -> tuple[list[int], list[float]]:
    """transformers' greedy ids and their logprobs."""
    model, _ = reference
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_scores=True)
    made = out.sequences[0, len(ids) :].tolist()
    return made, [scores[0].log_softmax(-1)[token].item() for scores, token in zip(out.scores, made, strict=True)]


@pytest.mark.parametrize("prompts", [PROMPTS, pytest.param(LONGER, marks=pytest.mark.slow)], ids=["many", "longer"])
def test_greedy_text_and_logprobs_equal_transformers(llm, reference, prompts):
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=1))
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        choice = output.outputs[0]
        ids = choice.token_ids
        with torch.inference_mode():  # once over prompt and answer: each token is the best one behind those before it
            logits = reference[0](torch.tensor([output.prompt_token_ids + ids])).logits[0, -len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids and (len(ids) == 8 or choice.finish_reason == "stop"), prompt
        logprobs = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        worst = max([worst, *(abs(entry[t].logprob - p) for entry, t, p in zip(choice.logprobs, ids, logprobs, strict=True))])
    assert worst < 1e-3, worst


def test_bad_words_are_those_of_the_server(llm):
    """One rule for both: the spellings of a word are what a body's bad_words become."""
    from rayneuron.api import openai
    from rayneuron.api.call import Context

    context = Context(models=("m",), text=llm.text, max_model_len=2048, vocab_size=llm.arch.vocab)
    for phrases in (["zebra crossing"], [" the", "fox"], ["水"]):
        served = openai.parse_completions({"prompt": "x", "bad_words": phrases}, context, request_id="r", created=1).requests[0].params
        request, _ = llm._request("x", SamplingParams(bad_words=tuple(phrases)))
        assert request.params.bad_words_ids == served.bad_words_ids


def test_without_a_tokenizer_ids_go_in_and_come_out(tiny, tmp_path):
    """A directory of weights alone: the ids of the same model with its tokenizer, whole and streamed; what needs words is refused."""
    for file in tiny.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    options = {"dtype": "fp32", "max_model_len": 128, "max_num_seqs": 2, "threads": 1}
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json.*skip_tokenizer_init"):
        LLM(tmp_path, **options)
    with LLM(tiny, **options) as worded:
        expected = worded.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        ends = worded.text.eos_ids
    with LLM(tmp_path, skip_tokenizer_init=True, **options) as llm:
        made = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        streamed = [token for delta in llm.stream([5, 6, 7], params) for token in delta.token_ids]
        assert (made.token_ids, streamed, made.text, llm.text.eos_ids) == (expected, expected, "", ends)
        asks = (("text", {}, "prompt"), ([5], {"stop": "x"}, "stop"), ([5], {"bad_words": ["x"]}, "bad_words"))
        for prompt, more, param in asks:
            with pytest.raises(RequestError, match="skip_tokenizer_init") as caught:
                llm.generate(prompt, params | more)
            assert caught.value.param == param
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("count", [600, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_long_prompt_in_chunks_equals_transformers(llm, reference, count):
    ids = llm.text.encode(words(1600))[:count]
    assert count > llm.config.prefill_chunk_tokens
    choice = llm.generate({"prompt_token_ids": ids}, {"temperature": 0, "max_tokens": 6, "logprobs": 0})[0].outputs[0]
    wanted, logprobs = expected(reference, ids, 6)
    assert choice.token_ids == wanted
    assert max(abs(entry[t].logprob - p) for entry, t, p in zip(choice.logprobs, wanted, logprobs, strict=True)) < 1e-3


def test_chat_template_is_transformers(llm, reference):
    model, tokenizer = reference
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20))[0]
    assert output.prompt_token_ids == ids
    wanted, _ = expected(reference, ids, 20)
    assert output.outputs[0].token_ids == wanted
    assert output.outputs[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None


def test_prompt_logprobs_equal_transformers(llm, reference):
    ids = llm.text.encode(words(200))
    output = llm.generate({"prompt_token_ids": ids}, {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 2})[0]
    with torch.inference_mode():
        logp = reference[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(ids)
    for i, entry in enumerate(output.prompt_logprobs[1:]):
        assert abs(entry[ids[i + 1]].logprob - logp[i, ids[i + 1]].item()) < 1e-3
        assert list(entry)[0] == logp[i].argmax().item()
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"


def test_choices_share_one_prefill_and_repeat_by_seed(llm):
    ids = llm.text.encode(words(60))
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, seed=5)
    before = llm.engine.steps
    first = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert llm.engine.steps - before <= 1 + 6 + 1, "the prompt was computed more than once"
    again = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    alone = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=1.0, max_tokens=6, seed=6))[0]
    assert alone.outputs[0].token_ids == first.outputs[1].token_ids  # choice i draws with seed + i


def test_stream_joins_to_the_same_text_and_closing_ends_the_work(llm):
    params = {"temperature": 0, "max_tokens": 24, "stop": ["lazy"]}
    whole = llm.generate(words(5), params)[0].outputs[0]
    parts = list(llm.stream(words(5), params))
    assert "".join(d.text for d in parts) == whole.text and parts[-1].finish_reason == whole.finish_reason
    stream = llm.stream(words(30), {"temperature": 0, "max_tokens": 1000, "ignore_eos": True})
    next(stream)
    stream.close()
    deadline = time.monotonic() + 60
    while llm.engine.has_work and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not llm.engine.has_work


def test_calls_from_many_threads_share_the_engine(llm):
    solo = [llm.generate(p, {"temperature": 0, "max_tokens": 6})[0].outputs[0].text for p in PROMPTS[:6]]
    got: dict[int, str] = {}

    def ask(i: int) -> None:
        got[i] = llm.generate(PROMPTS[i], {"temperature": 0, "max_tokens": 6})[0].outputs[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert [got[i] for i in range(6)] == solo


@pytest.mark.parametrize(
    ("prompt", "params", "field", "says"),
    [
        ("", {}, "prompt", "empty"),
        ([5, 60000], {}, "prompt", "60000"),
        (words(3000), {}, "prompt", "2048"),
        ("hi", {"max_tokens": 3000}, "max_tokens", "2048"),
        ("hi", {"temperature": 3}, "temperature", "between 0 and 2"),
        ("hi", {"temprature": 1}, "temprature", "known are"),
        ("hi", {"logit_bias": {99999: 1.0}}, "logit_bias", "99999"),
        ("hi", {"n": 2, "temperature": 0}, "n", "greedy"),
    ],
)
def test_wrong_requests_name_the_field(llm, prompt, params, field, says):
    with pytest.raises(RequestError, match=says) as error:
        llm.generate(prompt, params)
    assert error.value.param == field


def test_wrong_options_name_the_right_one(demo):
    with pytest.raises(ConfigError, match="did you mean tensor_parallel"):
        LLM(demo, tensor_paralel=1)
    with pytest.raises(ConfigError, match="device"):
        LLM(demo, device="cuda")


class TestAdapter:
    def test_greedy_batch_with_left_padding(self, llm, reference):
        model, tokenizer = reference
        tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
        inputs = tokenizer(["The capital of France is", "1, 2, 3,"], return_tensors="pt", padding=True)
        got = HuggingFaceGenerationAdapter(llm).generate(**inputs, max_new_tokens=6)
        wanted = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(got, wanted)

    def test_padding_without_a_mask_is_inferred_as_transformers_does(self, llm, reference):
        """A pad token that is no EOS marks padding wherever it stands; one that is, or none, marks nothing."""
        model, _ = reference
        eos = model.generation_config.eos_token_id
        long, short = (llm.text.encode(text) for text in ("The capital of France is", "1, 2, 3,"))
        pad, padded = next(i for i in range(100, 200) if i not in (*long, *short)), len(long) - len(short)
        adapter = HuggingFaceGenerationAdapter(llm)
        for token, more in ((pad, {}), (pad, {"eos_token_id": [eos, pad]}), (eos, {}), (pad, {"eos_token_id": pad})):
            ids = torch.tensor([long, [token] * padded + short]) if padded > 0 else torch.tensor([[token] * -padded + long, short])
            wanted = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=token, **more)
            assert torch.equal(adapter.generate(ids, max_new_tokens=4, pad_token_id=token, **more), wanted), (token, more)
        unset = torch.tensor([[pad, *short]])
        assert torch.equal(adapter.generate(unset, max_new_tokens=4), model.generate(unset, max_new_tokens=4, do_sample=False))

    def test_prompt_lookup_gives_what_it_gives_in_transformers(self, demo, reference):
        """With drafts, which here the deployment asks for: the same tokens in fewer steps; streamed and stopped token by token."""
        model, tokenizer = reference
        ids = tokenizer("one two three four five, one two three four five, one two three", return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=4)
        said = {"dtype": "fp32", "max_model_len": 256, "max_num_seqs": 2}
        with LLM(demo, **said, speculative_config={"num_speculative_tokens": 4, "adaptive": False}) as drafting:
            adapter = HuggingFaceGenerationAdapter(drafting)
            got = adapter.generate(ids, max_new_tokens=24, prompt_lookup_num_tokens=4, num_assistant_tokens=4)
            assert torch.equal(got, wanted) and drafting.engine.steps < 24
            streamed: list[list[int]] = []
            streamer = SimpleNamespace(put=lambda value: streamed.append(value.flatten().tolist()), end=lambda: None)
            end = ids.shape[1] + 3
            criteria = [lambda seen, _: seen.shape[1] >= end]
            three = adapter.generate(ids, max_new_tokens=24, streamer=streamer, stopping_criteria=criteria)
            assert torch.equal(three, wanted[:, :end]) and streamed[1:] == [[t] for t in three[0, end - 3 :].tolist()]
            with pytest.raises(RequestError, match="assistant_model.*needs an LLM that has loaded it; write LLM.path, speculative_config="):
                adapter.generate(ids, assistant_model=model)
            for name, value in (
                *(("prompt_lookup_num_tokens", wrong) for wrong in (0, -1, "4", True, 2.5, [4])),
                *(("num_assistant_tokens", 0), ("max_matching_ngram_size", 0), ("assistant_early_exit", "a")),
                *(("num_assistant_tokens_schedule", "never"), ("assistant_confidence_threshold", 1.5)),
            ):
                with pytest.raises(RequestError, match=f"{name} must be ") as refused:
                    adapter.generate(ids, **{name: value})
                assert refused.value.param == name
            same = adapter.generate(ids, max_new_tokens=4, assistant_confidence_threshold=0.4, num_assistant_tokens_schedule="constant")
            assert torch.equal(same, wanted[:, : ids.shape[1] + 4])

    @pytest.mark.slow
    def test_an_assistant_gives_what_it_gives_in_transformers(self, demo, reference):
        """With a draft model, which here the deployment names."""
        model, tokenizer = reference
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=model)
        said = {"dtype": "fp32", "max_model_len": 256, "max_num_seqs": 2}
        drafts = {"method": "draft_model", "quantization": "int8", "num_speculative_tokens": 4, "adaptive": False}
        with LLM(demo, **said, speculative_config=drafts) as llm:
            got = HuggingFaceGenerationAdapter(llm).generate(ids, max_new_tokens=24, assistant_model=model, num_assistant_tokens=4)
            assert torch.equal(got, wanted) and llm.engine.steps < 16

    def test_streamer_and_stopping_criteria(self, llm):
        from transformers import StoppingCriteriaList

        class Kept:
            def __init__(self):
                self.seen, self.ended = [], False

            def put(self, value):
                self.seen.append(value.flatten().tolist())

            def end(self):
                self.ended = True

        streamer, ids = Kept(), torch.tensor([llm.text.encode("Once upon a time")])
        five = StoppingCriteriaList([lambda ids, scores, **_: ids.shape[1] >= 9])
        out = HuggingFaceGenerationAdapter(llm).generate(ids, max_new_tokens=50, streamer=streamer, stopping_criteria=five)
        assert out.shape[1] == 9 and streamer.ended
        assert [t for part in streamer.seen for t in part] == out[0].tolist()

    @pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_strings_and_time_end_what_they_end_in_transformers(self, llm, reference, every):
        """A string within a token, over several beside one that never comes, and one that stands in the prompt too."""
        model, tokenizer = reference
        adapter, ids = HuggingFaceGenerationAdapter(llm), tokenizer("The capital of France is", return_tensors="pt").input_ids
        plain = model.generate(ids, max_new_tokens=24, do_sample=False)
        text = tokenizer.decode(plain[0, ids.shape[1] :])
        within, several, known = text[2:4], [text[5:17], "nowhere"], ["France", text[25:28]]
        for strings in (text[18:23], ["nowhere"]) if every else (within, several, known):
            how = {"max_new_tokens": 24, "do_sample": False, "stop_strings": strings, "tokenizer": tokenizer}
            got = adapter.generate(ids, **how)
            assert torch.equal(got, model.generate(ids, **how)), strings
            assert torch.equal(got, adapter.generate(ids, **{**how, "tokenizer": None}))
        assert adapter.generate(ids, max_new_tokens=200, max_time=1e-6).shape[1] == ids.shape[1] + 1
        assert torch.equal(adapter.generate(ids, max_new_tokens=24, max_time=600.0), plain)
        for wrong in ({"max_time": -1}, {"max_time": "soon"}, {"stop_strings": ""}, {"stop_strings": [3]}, {"max_time": 1, "num_beams": 2}):
            with pytest.raises(RequestError, match=next(iter(wrong))):
                adapter.generate(ids, max_new_tokens=4, **wrong)

    def test_sampling_repeats_and_groups_of_beams_are_refused(self, llm):
        adapter, ids = HuggingFaceGenerationAdapter(llm), torch.tensor([llm.text.encode("Once")])
        draw = lambda: adapter.generate(ids, do_sample=True, temperature=0.9, max_new_tokens=5, num_return_sequences=2, seed=3)  # noqa: E731
        assert torch.equal(draw(), draw()) and draw().shape[0] == 2
        with pytest.raises(RequestError, match="num_beam_groups"):
            adapter.generate(ids, num_beam_groups=4)
        with pytest.raises(RequestError, match="nonsense"):
            adapter.generate(ids, nonsense=1)



def test_programs_written_for_vllm_mean_here_what_they_mean_there(llm):
    """Its keywords count, a text is one stop string, parts of contents are texts; nothing that was said is passed over."""
    said = [{"role": "user", "content": "Name three colours."}]
    params = SamplingParams(temperature=0, max_tokens=12)
    chat = llm.chat(said, params)[0].outputs[0].text
    assert llm.chat(said, sampling_params=params)[0].outputs[0].text == chat
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name three colours."}]}]
    for answer in llm.chat(messages=(parts, said), sampling_params=params, chat_template_kwargs={"enable_thinking": False}):
        assert answer.outputs[0].text == chat
    plain = llm.generate(prompts=["1, 2, 3,"], sampling_params=params)[0].outputs[0].text
    assert plain.startswith(" 4, 5, 6")
    ended = llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=12, stop="5,"))[0].outputs[0]
    assert (ended.text, ended.stop_reason) == (" 4, ", "5,")
    one = SamplingParams(temperature=0, max_tokens=4, structured_outputs={"choice": ["yes"]}, logit_bias={"5": 1.0}, bad_words="no")
    assert llm.generate("Is it so?", one)[0].outputs[0].text == "yes"
    import numpy

    ids = llm.text.encode("1, 2, 3,")
    mapped = {"prompt_token_ids": numpy.array(ids), "prompt": None}
    for prompt in (numpy.array(ids), torch.tensor(ids), tuple(ids), torch.tensor([ids]), mapped):
        assert llm.generate(prompt, {"temperature": 0, "max_tokens": numpy.int64(12)})[0].outputs[0].text == plain
    assert llm.generate({"prompt": words(80), "cache_salt": "a"}, params)[0].num_cached_tokens == 0
    assert llm.generate({"prompt": words(80), "cache_salt": "b"}, params)[0].num_cached_tokens == 0
    assert llm.generate({"prompt": words(80), "cache_salt": "b"}, params)[0].num_cached_tokens > 0


TOOL = {"type": "function", "function": {"name": "x"}}


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda llm: llm.generate(None), "a prompt is a text.* got NoneType"),
        (lambda llm: llm.generate(5), "a prompt is a text.* got int"),
        (lambda llm: llm.generate(["a", None]), "a prompt is a text.* got NoneType"),
        (lambda llm: llm.generate(b"abc"), "a prompt is a text.* got bytes"),
        (lambda llm: llm.generate([[1, "a"]]), "a prompt is a text.* got list"),
        (lambda llm: llm.generate([[1.5, 2.5]]), "a prompt is a text.* got list"),
        (lambda llm: llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}), "multi_modal_data is not read here"),
        (lambda llm: llm.generate({}), "a prompt is a text.* got one with nothing"),
        (lambda llm: llm.generate("a", SamplingParams(structured_outputs={"choice": 5})), "structured_outputs"),
        (lambda llm: llm.generate("a", SamplingParams(stop_token_ids=["x"])), "stop_token_ids"),
        (lambda llm: llm.generate("a", SamplingParams(seed=None, ignore_eos="never")), "ignore_eos"),
        (lambda llm: llm.chat("hi"), "messages must be an array"),
        (lambda llm: llm.chat([{"role": "user"}]), r"messages\[0\].content is required"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], tools=[TOOL]), "no place for tools"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], temperature=0), "temperature: the chat template has no place"),
    ],
)
def test_what_is_no_prompt_and_no_parameter_is_a_request_error(llm, ask, says):
    with pytest.raises(RequestError, match=says):
        ask(llm)


def test_what_vllm_has_besides_is_said(llm):
    with pytest.raises(AttributeError, match="LLM has no get_tokenizer: llm.text has encode, decode and chat"):
        llm.get_tokenizer()
    assert not hasattr(llm, "beam_search") and not hasattr(llm, "generat")
