"""Random schemas whose literals name special tokens, at any temperature, cut anywhere: an answer that ends by itself
validates, by a validator that is not ours; one that was cut is the beginning of one that does; none leaves its form."""

import json
import random
from typing import Any

import jsonschema
import openai
import pytest

MORE = pytest.mark.slow("eight more schemas each", covers="service/text")
LITERALS = ("a", "<|end|>", "x<|start|>", '<|end|>"', "\\<|extra_1|>\n", "ä€😀", "<|", "")
MESSAGES: list[Any] = [{"role": "user", "content": "Say it as JSON."}]


def schema_of(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    literals = rng.sample(LITERALS, 3)
    simple: list[dict[str, Any]] = [
        {"enum": literals},
        {"const": rng.choice([literals[0], {literals[1]: 1}, [literals[2], None]])},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "boolean"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^<[|](end|start)[|]>[ab]{1,3}$"},
    ]
    if not depth:
        return rng.choice(simple)
    inner = [schema_of(rng, depth - 1) for _ in range(3)]
    nested: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": dict(zip(literals, inner, strict=True)),
            "required": literals[:2],
            "additionalProperties": False,
        },
        {"type": "array", "items": inner[0], "minItems": 1, "maxItems": 3},
        {"anyOf": inner[:2]},
    ]
    return rng.choice(nested)


def stream_of(
    client: openai.OpenAI, asked: dict[str, Any], most_events: int, last_id: str | None
) -> tuple[str, str, str | None]:
    """Text of a stream that its client leaves after so many events, with the id of the last one, and how it ended."""
    headers = {} if last_id is None else {"last-event-id": last_id}
    text, end = "", None
    with client.chat.completions.with_streaming_response.create(
        stream=True, extra_headers=headers, **asked
    ) as response:
        event_id = last_id or ""
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                end = choice["finish_reason"] or end
                most_events -= 1
            if not most_events:
                break
    return text, event_id, end


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=MORE) for seed in range(1, 12))])
def test_none_leaves_its_form(client: openai.OpenAI, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(8):
        schema = schema_of(rng)
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": MESSAGES,
            "response_format": form,
            "seed": 100 * seed + number,
            "temperature": rng.choice([0.0, 1.0, 1.5]),
            "max_tokens": 600,
        }
        whole = client.chat.completions.create(**asked).choices[0]
        text = whole.message.content or ""
        assert whole.finish_reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)
        tokens = rng.randint(1, 8)
        short = client.chat.completions.create(**{**asked, "max_tokens": tokens}).choices[0]
        assert text.startswith((short.message.content or "").rstrip("\ufffd"))
        assert short.finish_reason in ("length", "stop")
        stop = rng.choice(["<|", '"', "1", "e"])
        cut: Any = client.chat.completions.create(**asked, stop=[stop]).choices[0]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop if stop in text else None)
        assert cut.message.content == text.partition(stop)[0]
        first, event_id, end = stream_of(client, asked, rng.randint(2, 6), None)
        rest = "" if end else stream_of(client, asked, -1, event_id)[0]
        assert first + rest == text
