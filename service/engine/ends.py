"""Finds a model's end tokens: all that its files name, and the control token with which its chat template ends an
assistant turn, but not the token that starts the next turn."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from service.errors import StartupError
from service.text.special_tokens import control_tokens
from service.text.tokenizer import TEMPLATE_ERRORS

_GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_NAMES = frozenset(
    {"</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>"}
    | {"<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<turn|>"}
    | {"<end_of_utterance>"}
)
"""Names of control tokens that llama.cpp treats as end tokens; older files name only one by key."""
_FIRST, _ANSWER, _SECOND = "What is first?", "An answer.", "What is second?"
_TURNS = [
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
]


def end_token_ids(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Union of the end token ids that configuration, tokenizer and chat template name. Raises StartupError if there are
    none."""
    ids = set[int]()
    for source in (config, config.get_text_config(), generation):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    control = control_tokens(tokenizer.added_tokens_decoder)
    names = (tokenizer.eos_token, _end_of_turn(tokenizer, control))
    ids.update(control[str(name)] for name in names if name in control)
    # transformers adds names that the vocabulary lacks, with ids beyond the model's vocabulary.
    ends = frozenset(token_id for token_id in ids if 0 <= token_id < config.get_text_config().vocab_size)
    if not ends:
        raise StartupError(
            "neither the model's configuration nor its tokenizer names an end token, so answers would never end; "
            "set eos_token_id in config.json"
        )
    return ends


def gguf_end_ids(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End token ids of a GGUF file: its end of text, turn and message, and control tokens with known names."""
    stated = (fields.get(f"tokenizer.ggml.{key}") for key in _GGUF_KEYS)
    control = control_tokens(tokenizer.added_tokens_decoder)
    known = (token_id for name, token_id in control.items() if name in _GGUF_NAMES)
    return frozenset([*(one for one in stated if one is not None), *known])


def names_of_ends(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Format end tokens for logs: their names, or ids where they have none, separated by spaces."""
    return " ".join(str(tokenizer.convert_ids_to_tokens(one) or one) for one in sorted(ids))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, control: Mapping[str, int]) -> str | None:
    """First control token that the chat template writes after an answer. Returns None if there is none, or if that
    token only starts the next turn."""
    if tokenizer.chat_template is None or not control:
        return None
    try:
        whole, ended = (str(tokenizer.apply_chat_template(_TURNS[:count], tokenize=False)) for count in (3, 2))
    except TEMPLATE_ERRORS:
        return None  # the template does not support this conversation
    opening, _, rest = whole.partition(_FIRST)
    between = rest.partition(_ANSWER)[2].partition(_SECOND)[0]
    found = re.search("|".join(map(re.escape, sorted(control, key=len, reverse=True))), between)
    if found is None:
        return None
    is_start = found[0] in opening and found[0] not in ended.rpartition(_ANSWER)[2]
    return None if is_start else found[0]
