"""The tokens that end an answer: all that a model's files name, and the one with which its chat template ends a turn of
the assistant. Each is one control token; the start of a turn is no end."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from service.errors import StartupError
from service.text.tokenizer import TEMPLATE_ERRORS, control_tokens

_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_NAMES = frozenset(
    {"</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>"}
    | {"<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<end_of_utterance>"}
)
"""Control tokens that end a text in llama.cpp, by their names: older files state only one of their ends."""
_FIRST, _ANSWER, _SECOND = "What is first?", "An answer.", "What is second?"
_TURNS = [
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
]


def end_token_ids(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Ids that end an answer: all that are named. Raises StartupError where there is none."""
    ids = set[int]()
    for source in (config, config.get_text_config(), generation):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    control = control_tokens(tokenizer.added_tokens_decoder)
    names = (tokenizer.eos_token, _end_of_turn(tokenizer, control))
    ids.update(control[str(name)] for name in names if name in control)
    # transformers adds a name that a tokenizer's vocabulary lacks behind the model's own.
    ends = frozenset(token_id for token_id in ids if 0 <= token_id < config.get_text_config().vocab_size)
    if not ends:
        raise StartupError(
            "neither the model's configuration nor its tokenizer names an end of text, so answers would never end; "
            "set eos_token_id in config.json"
        )
    return ends


def gguf_end_ids(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a text, a turn or a message: those that a GGUF file states, and control tokens with such a name."""
    stated = (fields.get(f"tokenizer.ggml.{key}") for key in _GGUF_KEYS)
    control = control_tokens(tokenizer.added_tokens_decoder)
    known = (token_id for name, token_id in control.items() if name in _GGUF_NAMES)
    return frozenset([*(one for one in stated if one is not None), *known])


def names_of_ends(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Ends by name, separated by blanks; by number where the tokenizer has no name."""
    return " ".join(str(tokenizer.convert_ids_to_tokens(one) or one) for one in sorted(ids))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, control: Mapping[str, int]) -> str | None:
    """The first control token that the chat template writes behind an answer; None where it writes none, or one that
    only begins the next turn."""
    if tokenizer.chat_template is None or not control:
        return None
    try:
        whole, ended = (str(tokenizer.apply_chat_template(_TURNS[:count], tokenize=False)) for count in (3, 2))
    except TEMPLATE_ERRORS:
        return None  # a template of another kind of conversation; the files' own ends hold
    opening, _, rest = whole.partition(_FIRST)
    between = rest.partition(_ANSWER)[2].partition(_SECOND)[0]
    found = re.search("|".join(map(re.escape, sorted(control, key=len, reverse=True))), between)
    if found is None:
        return None
    is_start = found[0] in opening and found[0] not in ended.rpartition(_ANSWER)[2]
    return None if is_start else found[0]
