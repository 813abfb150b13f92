"""Log-probabilities in OpenAI's two shapes: a list of records for chat, parallel lists for plain completions."""

from collections.abc import Sequence

from pydantic import JsonValue

from service.engine.requests import TokenLogprob
from service.tokenizer import ChatTokenizer

# JSON knows no infinity; this is what OpenAI's servers send instead.
_LOWEST_LOGPROB = -9999.0


def chat_logprobs(
    tokens: Sequence[TokenLogprob] | None, tokenizer: ChatTokenizer, *, num_top: int
) -> dict[str, JsonValue] | None:
    if tokens is None:
        return None
    return {"content": [_record(token, tokenizer, num_top) for token in tokens], "refusal": None}


def _record(token: TokenLogprob, tokenizer: ChatTokenizer, num_top: int) -> JsonValue:
    top: list[JsonValue] = [_entry(token_id, logprob, tokenizer) for token_id, logprob in token.top[:num_top]]
    return {**_entry(token.token_id, token.logprob, tokenizer), "top_logprobs": top}


def _entry(token_id: int, logprob: float, tokenizer: ChatTokenizer) -> dict[str, JsonValue]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def legacy_logprobs(
    tokens: Sequence[TokenLogprob] | None, tokenizer: ChatTokenizer, *, num_top: int, text_offset: int
) -> dict[str, JsonValue] | None:
    """`text_offset` is where the first of these tokens begins in the choice's text."""
    if tokens is None:
        return None
    texts = [_text(tokenizer.token_bytes(token.token_id)) for token in tokens]
    offsets = [text_offset + sum(map(len, texts[:position])) for position in range(len(texts))]
    return {
        "tokens": list[JsonValue](texts),
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token, tokenizer, num_top) for token in tokens],
        "text_offset": list[JsonValue](offsets),
    }


def legacy_length(tokens: Sequence[TokenLogprob] | None, tokenizer: ChatTokenizer) -> int:
    """By how much these tokens move the next `text_offset`."""
    return sum(len(_text(tokenizer.token_bytes(token.token_id))) for token in tokens or ())


def _top_by_text(token: TokenLogprob, tokenizer: ChatTokenizer, num_top: int) -> JsonValue:
    by_text: dict[str, JsonValue] = {}
    for token_id, logprob in token.top[:num_top]:
        # Different parts of characters look alike as text: the likeliest one keeps the place.
        by_text.setdefault(_text(tokenizer.token_bytes(token_id)), _finite(logprob))
    return by_text


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
