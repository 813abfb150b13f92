"""Request fields that are known but cannot be honoured: refused by name, unless their value asks for nothing."""

from collections.abc import Mapping

from pydantic import JsonValue

from service.api.schemas import ChatCompletionRequest, SamplingFields
from service.api.settings import IgnoredFields
from service.errors import InvalidRequest

_HARMLESS: dict[str, tuple[JsonValue, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "prompt_embeds": (),
    "documents": (),
    "chat_template": (),
    "echo": (False,),
    "suffix": ("",),
    "add_special_tokens": (False,),
}
_HARMLESS_IN_MESSAGES: dict[str, tuple[JsonValue, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}
_IGNORED_ON_PURPOSE = frozenset({"best_of", "parallel_tool_calls"})


def refuse_unsupported(body: SamplingFields, ignored_fields: IgnoredFields) -> None:
    """Refuse what cannot be honoured, and log once what is not known at all."""
    extra = body.model_extra or {}
    _refuse(extra, _HARMLESS, prefix="")
    if isinstance(body, ChatCompletionRequest):
        for position, message in enumerate(body.messages):
            _refuse(message.model_extra or {}, _HARMLESS_IN_MESSAGES, prefix=f"messages.{position}.")
    for name in extra.keys() - _HARMLESS.keys() - _IGNORED_ON_PURPOSE:
        ignored_fields.note(name)


def _refuse(extra: Mapping[str, JsonValue], harmless: Mapping[str, tuple[JsonValue, ...]], *, prefix: str) -> None:
    for name, value in extra.items():
        if value is None or name not in harmless or value in harmless[name]:
            continue
        path = prefix + name
        if name == "tools" and value == []:
            raise InvalidRequest("Invalid value for 'tools': the list is too short.", param=path)
        raise InvalidRequest(f"This server does not support '{path}' with this value.", param=path)
