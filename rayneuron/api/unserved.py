"""Fields of other servers that would change the answer and are not served here: refused by name, never passed over."""

from __future__ import annotations

from typing import Any, Final

Rows = tuple[tuple[str, tuple[Any, ...], str], ...]  # what to do instead, values that change nothing, names
Unserved = dict[str, tuple[str, tuple[Any, ...]]]  # by name

NONE: Final[tuple[Any, ...]] = (False, "", [], {})  # they ask for nothing, whatever the field
LEAVE = "leave it out"
FREE = "send response_format or structured_outputs"
BEAMS = "its beams are one group; send num_beams or use_beam_search, and leave it out"

# Of OpenAI, vLLM, SGLang, llama.cpp, TGI, LMI, transformers, Mistral, Ollama.
_ANYWHERE: Final[Rows] = (
    (FREE, (), "json_schema format"),  # {} is a schema
    (FREE, NONE, "guided_decoding guided_decoding_backend regex ebnf grammar structural_tag"),
    (LEAVE, NONE, "output_formatter repetition_detection"),
    ("send the adapter's name as model", NONE, "lora_path lora_request lora adapter prompt_adapter_request"),
    ("send the fields in it at the top level", NONE, "extra_body sampling_params parameters options generation_config"),
    ("send tools with tool_choice none", NONE, "functions"),
    (LEAVE, ("none", *NONE), "function_call"),
    ("its models read and write text only", NONE, "audio image_data audio_data video_data images mm_processor_kwargs"),
    (LEAVE, NONE, "web_search_options input_embeds session_params samplers custom_logit_processor custom_params vllm_xargs watermark"),
    (LEAVE, NONE, "return_hidden_states stop_regex sequence_bias negative_prompt negative_prompt_ids safe_prompt instructions"),
    (LEAVE, NONE, "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id begin_suppress_tokens input_prefix"),
    (LEAVE, NONE, "input_suffix tool_prompt guideline prompt_template transforms t_max_predict_ms"),
    (LEAVE, ("medium", *NONE), "verbosity"),
    (LEAVE, (0,), "penalty_alpha epsilon_cutoff eta_cutoff encoder_no_repeat_ngram_size top_a top_h mirostat dry_multiplier"),
    (LEAVE, (0,), "xtc_probability dynatemp_range smoothing_factor"),
    (LEAVE, (1,), "tfs_z encoder_repetition_penalty guidance_scale"),
    (LEAVE, (-1, 0), "top_n_sigma"),
    (BEAMS, (1,), "num_beam_groups beam_width"),
    (BEAMS, (0, *NONE), "diversity_penalty"),
    ("send temperature: 0 for the likeliest token", (True,), "do_sample"),
    ("send return_token_ids: true, the ids come beside the text", (True,), "detokenize"),
    ("send chat_template_kwargs", ({"type": "disabled"}, *NONE), "thinking"),
    ("send it in chat_template_kwargs", (), "enable_thinking"),
    ("send it as a message of role system", NONE, "system"),
    ("send max_tokens", (), "max_new_tokens n_predict num_predict max_length max_gen_len max_output_tokens"),
    ("send min_tokens", (0,), "min_new_tokens min_length"),
    ("send stop", NONE, "stop_sequences stop_strings stop_token_strings"),
    ("send repetition_penalty", (1,), "repeat_penalty"),
    ("send seed", (-1,), "random_seed sampling_seed"),
    ("send banned_token_ids", NONE, "suppress_tokens banned_tokens custom_token_bans"),
    ("send bad_words", NONE, "bad_words_ids"),
    ("send logprobs", (0, *NONE), "n_probs top_n_tokens return_logprob top_logprobs_num token_ids_logprob"),
    ("send prompt_logprobs", NONE, "decoder_input_details"),
    ("send truncate_prompt_tokens", (0, *NONE), "truncate n_keep"),
    ("send include_stop_str_in_output", NONE, "no_stop_trim"),
    ("send echo to /v1/completions", NONE, "return_full_text"),
    ("send the ids as prompt to /v1/completions", NONE, "input_ids"),
)
_COMPLETIONS: Final[Rows] = (
    ("it belongs to /v1/chat/completions", NONE, "messages tools documents chat_template chat_template_kwargs continue_final_message"),
    ("it belongs to /v1/chat/completions", ("none", "auto"), "tool_choice"),
    ("send max_tokens; this one belongs to /v1/chat/completions", (), "max_completion_tokens"),
    ("send logprobs; this one belongs to /v1/chat/completions", (0,), "top_logprobs"),
    ("its models go on with a text, they do not fill one in; leave it out", NONE, "suffix"),
)
_CHAT: Final[Rows] = (("it belongs to /v1/completions", NONE, "prompt echo suffix prompt_embeds"),)
# What each of the two endpoints refuses.
COMPLETIONS: Final[Unserved] = {name: row[:2] for row in (*_ANYWHERE, *_COMPLETIONS) for name in row[2].split()}
CHAT: Final[Unserved] = {name: row[:2] for row in (*_ANYWHERE, *_CHAT) for name in row[2].split()}
