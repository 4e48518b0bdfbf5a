"""Chat templates as models bring them, each cut to what is its own way."""

# ruff: noqa: E501

from __future__ import annotations

ALTERNATE = (
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
TEMPLATES: dict[str, str] = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama-2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set told = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set told = false %}{% endif %}" + ALTERNATE + "{% if loop.index0 == 0 and told != false %}"
    "{% set content = '<<SYS>>\n' + told + '\n<</SYS>>\n\n' + m['content'] %}{% else %}{% set content = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama-3": "{%- for m in messages %}\n    {%- set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim"
    " + '<|eot_id|>' %}\n    {%- if loop.first %}{% set text = bos_token + text %}{% endif %}\n    {{- text }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    "llama-3 tools": "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' or m.role == 'ipython' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% else %}<{{ m.role }}>{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}",
    "mistral": "{% set rest = messages %}{{ bos_token }}" + ALTERNATE + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant!') }}{% endif %}"
    "{% endfor %}",
    "mistral, system last": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    + ALTERNATE
    + "{% if m.role == 'user' %}[INST] {% if loop.last and rest != messages %}{{ messages[0].content + '\n\n' }}{% endif %}{{ m.content }}"
    "[/INST]{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set rest = messages %}" + ALTERNATE + "{% if m['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n{% elif m['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
    "{% endif %}\n{% endfor %}",
    "deepseek": "{% set ns = namespace(told='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.told = m['content'] %}{% endif %}"
    "{% endfor %}{{ bos_token }}{{ ns.told }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<User>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<Assistant>' + content + eos_token }}{% endif %}{% endfor %}",
    "phi-3": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n<|assistant|>\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}",
    "developer": "{% for m in messages %}{% if m.role == 'developer' %}<dev>{{ m.content }}{% elif m.role == 'user' %}<u>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<a>{{ m.content }}{% endif %}{% endfor %}",
    "cut": "{% for m in messages %}<{{ m.role }}>{{ m.content[:5] }}{% endfor %}",
    "of everything": "{%- macro say(m) -%}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{%- endmacro -%}"
    "{% set seen = namespace(n=0) %}{% set d = dict(a=1, b=[1, 'é<']) %}{{ d | tojson }}{{ d | tojson(indent=2, sort_keys=true) }}"
    "{{ dict.fromkeys(['x'], 1) }}{% for m in messages %}{% if loop.index > 6 %}{% break %}{% endif %}{% set seen.n = seen.n + 1 %}"
    "{{ say(m) }}{% continue %}never{% endfor %}{{ seen.n }}{{ strftime_now('%Y') }}{{ unknown }}{{ unknown is defined }}\n   {# gone #}\n"
    "   {% if true %}\n   kept\n   {% endif %}\n{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
}  # fmt: skip
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
