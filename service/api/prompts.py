"""Encode the texts of a body: conversations with the model's chat template, and prompts of `/v1/completions`, with
`suffix` in the model's fill-in-the-middle format."""

from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from service.api.schemas import (
    ChatMessage,
    ChatTemplateFields,
    CompletionFields,
    CompletionRequest,
    Prediction,
    ToolCall,
    ToolDefinition,
    text_of,
)
from service.errors import InvalidRequest
from service.runtime import ModelCard
from service.text.chat_template import Traits, past_arguments
from service.text.tokenizer import ChatTokenizer

_LAYOUTS = (
    ("<fim_prefix>", "prompt", "<fim_suffix>", "suffix", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "prompt", "<fim-suffix>", "suffix", "<fim-middle>"),  # SantaCoder
    ("<|fim_prefix|>", "prompt", "<|fim_suffix|>", "suffix", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("\u2581<PRE>", "prompt", "\u2581<SUF>", "suffix", "\u2581<MID>"),  # CodeLlama
    # DeepSeek-Coder
    ("<\uff5cfim\u2581begin\uff5c>", "prompt", "<\uff5cfim\u2581hole\uff5c>", "suffix", "<\uff5cfim\u2581end\uff5c>"),
    ("[SUFFIX]", "suffix", "[PREFIX]", "prompt"),  # Codestral
)
"""Fill-in-the-middle formats of model families: control tokens and the two texts, in training order."""
_ENDS = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|EOT|>", "\u2581<EOT>", "[MIDDLE]", "<fim_pad>", "<fim-pad>", "<|fim_pad|>"}
    | {"<file_sep>", "<|file_sep|>", "<|file_separator|>", "<filename>", "<repo_name>", "<reponame>", "<|repo_name|>"}
).union(*_LAYOUTS)
"""Control tokens that end the filled gap: fill-in-the-middle tokens, ends of text, file separators."""
_ANCHOR = "\u263a"  # a character that tokenizers never merge with its neighbours


def render(
    messages: list[ChatMessage],
    body: ChatTemplateFields,
    tokenizer: ChatTokenizer,
    tools: Sequence[ToolDefinition] = (),
    most_tokens: int | None = None,
) -> list[int]:
    """Render a conversation with the model's chat template and encode it. A text that cannot fit `most_tokens` is
    refused before encoding. Raises InvalidRequest."""
    if body.continue_final_message and body.add_generation_prompt:
        reason = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        raise InvalidRequest(reason, param="continue_final_message")
    traits = tokenizer.traits(with_tools=bool(tools))
    return tokenizer.render_chat(
        [_for_template(message, f"messages.{index}", traits) for index, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_none=True, mode="json") for tool in tools],
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
        chat_template_kwargs=body.chat_template_kwargs,
        most_tokens=most_tokens,
    )


def _for_template(message: ChatMessage, param: str, traits: Traits) -> dict[str, JsonValue]:
    """Convert a message to the form that chat templates expect. Raises InvalidRequest."""
    content = message.content if message.content is not None else message.refusal
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if content is None and not (message.role == "assistant" and (message.tool_calls or thought is not None)):
        param = f"{param}.content"
        raise InvalidRequest(f"Invalid value for '{param}': it must be a string, not null.", param=param)
    if message.tool_calls and message.role != "assistant":
        param = f"{param}.tool_calls"
        raise InvalidRequest(f"Invalid value for '{param}': only an assistant message may have it.", param=param)
    if message.role == "tool" and message.tool_call_id is None:
        param = f"{param}.tool_call_id"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    # 'developer' is OpenAI's newer name for 'system', which templates do not know.
    plain: dict[str, JsonValue] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = "" if content is None else text_of(content)
    optional = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thought}
    plain |= {name: value for name, value in optional.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            _past_call(call, f"{param}.tool_calls.{n}.function.arguments", traits)
            for n, call in enumerate(message.tool_calls)
        ]
    return plain


def _past_call(call: ToolCall, param: str, traits: Traits) -> JsonValue:
    """Convert a past call to the form that the template expects. Raises InvalidRequest."""
    text, parsed = past_arguments(call.function.arguments, param)
    arguments = parsed if traits.arguments == "object" else text
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def encode_prompts(
    body: CompletionRequest, tokenizer: ChatTokenizer, most_tokens: int | None = None, *, control: bool
) -> list[list[int]]:
    """Encode each prompt; a text that cannot fit `most_tokens` is refused. `control`: names of control tokens in a
    prompt are encoded as control tokens, unless there is a `suffix`. Raises InvalidRequest."""
    prompts: list[Any] = [body.prompt] if isinstance(body.prompt, str) else [*body.prompt]
    if not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    for text in (one for one in (*prompts, body.suffix) if isinstance(one, str)):
        tokenizer.refuse_longer(text, most_tokens, "prompt")
    special = body.add_special_tokens is not False
    if body.suffix:
        return [_with_gap(one, body, tokenizer, special=special) for one in prompts]
    return [
        tokenizer.encode(one, add_special_tokens=special, control=control) if isinstance(one, str) else one
        for one in prompts
    ]


def encode_begun(predicted: Prediction, tokenizer: ChatTokenizer, most_tokens: int) -> list[int]:
    """Encode the first `most_tokens` tokens of a predicted answer, reading no more text than they can stand for."""
    begun = text_of(predicted.content).encode()[: most_tokens * tokenizer.longest_token_bytes]
    return tokenizer.encode(begun.decode(errors="ignore"))[:most_tokens]  # errors="ignore" drops a cut character


def gap_ends(body: CompletionFields, tokenizer: ChatTokenizer) -> frozenset[int]:
    """Return the tokens that end a filled gap, in addition to the model's end tokens; none without `suffix`."""
    if not isinstance(body, CompletionRequest) or not body.suffix or body.ignore_eos:
        return frozenset()
    return frozenset(token_id for name, token_id in tokenizer.special_ids.items() if name in _ENDS)


def _with_gap(prompt: object, body: CompletionRequest, tokenizer: ChatTokenizer, *, special: bool) -> list[int]:
    """Encode prompt and suffix in the model's fill-in-the-middle format. Raises InvalidRequest."""
    places, suffix = {"prompt", "suffix"}, body.suffix or ""
    known = (one for one in _LAYOUTS if tokenizer.special_ids.keys() >= set(one) - places)
    if (layout := next(known, None)) is None:
        reason = "its tokenizer has no fill-in-the-middle tokens"
        raise InvalidRequest(f"'suffix' is not supported by this model: {reason}.", param="suffix")
    if not isinstance(prompt, str):
        raise InvalidRequest("'suffix' needs a prompt of text, not of token ids.", param="suffix")
    if body.echo:
        raise InvalidRequest("'echo' cannot be combined with 'suffix'.", param="echo")
    texts = {"prompt": tokenizer.encode(prompt), "suffix": _continued(suffix, tokenizer)}
    ids = tokenizer.encode("", add_special_tokens=special)
    for part in layout:
        ids += texts[part] if part in places else [tokenizer.special_ids[part]]
    return ids


def _continued(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Encode text within a document, without the blank that some tokenizers prepend."""
    anchor = tokenizer.encode(_ANCHOR)
    if not (tokenizer.token_string(anchor[0]) or "").startswith("\u2581"):
        return tokenizer.encode(text)
    return tokenizer.encode(_ANCHOR + text)[len(anchor) :]


def check_token_ids(ids: Sequence[int], card: ModelCard, *, param: str) -> None:
    """Raise InvalidRequest for token ids outside of the vocabulary."""
    for token_id in ids:
        if token_id >= card.vocab_size:
            raise InvalidRequest(
                f"Invalid value for '{param}': token {token_id} is outside of the vocabulary "
                f"of {card.vocab_size} tokens.",
                param=param,
            )
