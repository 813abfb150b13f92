"""Chat templates with the rules of eleven families, in words of their own, and what the probe finds in them."""

from functools import cache
from string import Template
from typing import Any

from transformers import PreTrainedTokenizerFast

from service.text.tokenizer import ChatTokenizer
from tests.service.text.tiny_tokenizer import tiny_tokenizer

_SHARED = {
    "alternate": r"""
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('user and assistant must alternate') }}{% endif %}
""",
    "calls": r"""
{% for c in m.tool_calls or [] %}
{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{ '}\n</tool_call>' }}
{% endfor %}
""",
    "result": r"""
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
""",
    "end": r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
"""Parts of several templates."""
_QWEN_2_5 = r"""
{% if tools %}
{{ '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') }}
{{ 'Functions, to be called in <tool_call>:\n' + tools | tojson + '<|im_end|>\n' }}
{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{% else %}{{ '<|im_start|>system\nBe of help.<|im_end|>\n' }}{% endif %}
{% for m in messages %}
{% if m.role == 'tool' %}$result
{% elif m.role != 'system' or not loop.first %}
{{ '<|im_start|>' + m.role + '\n' + m.content }}$calls{{ '<|im_end|>\n' }}
{% endif %}
{% endfor %}$end
"""
_QWEN_3 = _QWEN_2_5.replace(
    "{% elif m.role != 'system' or not loop.first %}",
    r"""
{% elif m.role == 'system' and not loop.first %}{{ raise_exception('a system message must be at the beginning') }}
{% elif m.role != 'system' %}
""",
).replace(
    "+ m.content }}",
    r"""}}
{% if m.reasoning_content and 'user' not in messages[loop.index0:] | map(attribute='role') %}
{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{ m.content }}
""",
)
_LLAMA_2 = r"""
{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}$alternate
{% if m.role == 'user' %}
{{ '<s>[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '') }}
{{ m.content | trim + ' [/INST]' }}
{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' </s>' }}{% endif %}
{% endfor %}
"""
_LLAMA_3_1 = r"""
{% macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{% set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}
{{ head('system') + system + '<|eot_id|>' }}
{% if tools %}
{% if not messages %}{{ raise_exception('there is no first message of the user for the functions') }}{% endif %}
{{ head('user') + 'Answer with {"name": a name, "parameters": an object}:\n' + tools | tojson(indent=4) + '\n' }}
{{ messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}
{% endif %}
{% for m in messages %}
{% if m.tool_calls is defined %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('this model makes one call at a time') }}{% endif %}
{% set called = m.tool_calls[0].function %}
{{ head('assistant') + '{"name": "' + called.name + '", "parameters": ' + called.arguments | tojson + '}<|eot_id|>' }}
{% elif m.role == 'tool' %}{{ head('ipython') + m.content | tojson + '<|eot_id|>' }}
{% else %}{{ head(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""
_MISTRAL = r"""
{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{% set turns = messages[1:] if messages[0].role == 'system' else messages %}
{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{% set spoken = namespace(turns=0) %}
{% for m in turns if m.role != 'tool' and m.tool_calls is not defined %}
{% if (m.role == 'user') != (spoken.turns % 2 == 0) %}
{{ raise_exception('user and assistant must alternate') }}{% endif %}
{% set spoken.turns = spoken.turns + 1 %}
{% endfor %}
{% for m in turns %}
{% if m.role == 'user' %}
{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools and m == asked[-1] else '' }}
{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}
{% elif m.tool_calls is defined %}
{{ '[TOOL_CALLS] [' }}
{% for c in m.tool_calls %}
{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
{{ (c.function | tojson)[:-1] + ', "id": "' + c.id + ('"}, ' if not loop.last else '"}') }}
{% endfor %}
{{ ']</s>' }}
{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + '</s>' }}
{% elif m.role == 'tool' %}
{% if m.tool_call_id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
{{ '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{% else %}{{ raise_exception('there are users and assistants only') }}{% endif %}
{% endfor %}
"""
_GEMMA = r"""
{{ '<bos>' }}
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}$alternate
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}
{{ '\n' + m.content | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
_DEEPSEEK_V3 = r"""
{% for m in messages if m.role == 'system' %}{{ m.content + '\n\n' }}{% endfor %}
{{ 'Functions: ' + tools | tojson if tools else '' }}
{% for m in messages %}
{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
{% elif m.role == 'assistant' and m.content is none %}
{{ '<|Assistant|>' }}
{% for c in m.tool_calls %}
{{ '<|call|>' + c.type + '<|sep|>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}
{% endfor %}
{% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + '<|end|>' }}
{% elif m.role == 'tool' %}{{ '<|output|>' + m.content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}
"""
_PHI_3 = r"""
{% for m in messages %}
{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}
{% elif m.role == 'assistant' %}{{ m.content + '<|end|>\n' }}{% endif %}
{% endfor %}
"""
_GRANITE_3 = r"""
{% set begun = 1 if messages[0].role == 'system' else 0 %}
{{ '<|start|>system<|role|>' + (messages[0].content if begun else 'Be brief.') + '<|end|>\n' }}
{{ '<|start|>available_tools<|role|>' + tools | tojson(indent=4) + '<|end|>\n' if tools else '' }}
{% for m in messages[begun:] %}
{{ '<|start|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|role|>' + m.content + '<|end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant<|role|>' }}{% endif %}
"""
_COMMAND_R = r"""
{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}$alternate{% endfor %}
{% for m in messages %}{{ '<|START|><|' + m.role + '|>' + m.content | trim + '<|END|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|START|><|assistant|>' }}{% endif %}
"""
_COMMAND_R_TOOLS = r"""
{% for tool in tools %}
{{ 'def ' + tool.function.name + '(' + tool.function.parameters.properties.keys() | join(', ') + ')\n' }}
{% endfor %}
{% for m in messages %}
{{ '<|' + m.role + '|>' + m.content }}
{% for c in m.tool_calls or [] %}
{{ 'Action: ' + {'tool_name': c.function.name, 'parameters': c.function.arguments} | tojson }}
{% endfor %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
_SMOLLM_3 = r"""
{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{{ '### Tools\n' + xml_tools | string if xml_tools else '' }}{{ '<|im_end|>\n' }}
{% for m in messages %}
{% if m.role == 'user' or m.role == 'tool' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{% elif m.role == 'assistant' %}
{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content + '<|im_end|>\n' }}
{% endif %}
{% endfor %}$end
"""

TEMPLATES: dict[str, str | dict[str, str]] = {
    "qwen2.5": _QWEN_2_5,
    "qwen3": _QWEN_3,
    "llama2": _LLAMA_2,
    "llama3.1": _LLAMA_3_1,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "deepseek_v3": _DEEPSEEK_V3,
    "phi3": _PHI_3,
    "granite3": _GRANITE_3,
    "command_r": {"default": _COMMAND_R, "tool_use": _COMMAND_R_TOOLS},
    "smollm3": _SMOLLM_3,
}
_IN_WORDS: dict[str, Any] = {"form": None, "calls": "text", "results": "user", "arguments": "text"}
FOUND: dict[str, dict[str, Any]] = {
    "qwen2.5": {},
    "qwen3": {"system": "first", "keeps_thoughts": True},
    "llama2": {**_IN_WORDS, "alternates": True, "system": "first"},
    "llama3.1": {"opens_with_user": True, "calls": "one", "text_beside_calls": False},
    "mistral": {"alternates": True, "system": "last", "short_ids": True, "text_beside_calls": False},
    "gemma": {**_IN_WORDS, "alternates": True, "system": "user"},
    "deepseek_v3": {"arguments": "text", "null_content": True, "text_beside_calls": False},
    "phi3": {**_IN_WORDS, "system": "user"},
    "granite3": {"calls": "text", "arguments": "text"},
    "command_r": {},
    "smollm3": {**_IN_WORDS, "system": "first"},
}
"""The traits of each family with tools, beside those of a template that can say everything."""


@cache
def stock_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's template."""
    template, made = TEMPLATES[family], tiny_tokenizer()
    if isinstance(template, str):
        made.chat_template = _joined(template)
    else:
        made.chat_template = {name: _joined(one) for name, one in template.items()}
    return made


@cache
def tokenizer_of(family: str) -> ChatTokenizer:
    """The same as the server uses it."""
    return ChatTokenizer(stock_of(family))


def _joined(source: str) -> str:
    """A template without the line breaks of its source: only strings in it write any."""
    return "".join(line.strip() for line in Template(source).substitute(_SHARED).splitlines())
