"""Prompts of `/v1/completions`: control tokens are the client's to write, and gaps are filled where models know how."""

from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from service.api.prompts import encode_prompts
from service.api.schemas import CompletionRequest
from service.engine.requests import GenerationRequest, TokenLogprob
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import ASK, CHAT, TEXT, client_of, error_of, events_of
from tests.service.scripted import TOKENIZER, ScriptedEngine, say, step

BOS, IM_START, IM_END = (TOKENIZER.special_ids[name] for name in ("<|bos|>", "<|im_start|>", "<|im_end|>"))


async def post(
    engine: ScriptedEngine,
    *,
    path: str = TEXT,
    tokenizer: ChatTokenizer = TOKENIZER,
    control: bool = True,
    **fields: Any,
) -> httpx2.Response:
    body = {**(ASK if path == CHAT else {"model": "tiny", "prompt": "a"}), **fields}
    async with client_of(engine, tokenizer=tokenizer, control_in_prompts=control) as client:
        return await client.post(path, json=body)


async def submitted(**fields: Any) -> GenerationRequest:
    engine = ScriptedEngine(say("x"))
    response = await post(engine, **fields)
    assert response.status_code == 200, response.text
    return engine.submitted[0]


async def test_control_tokens_of_a_prompt_are_control_tokens() -> None:
    request = await submitted(prompt="<|im_start|>the<|im_end|>")
    assert list(request.prompt) == [BOS, IM_START, *TOKENIZER.encode("the"), IM_END]


async def test_control_tokens_of_a_prompt_are_text_where_the_operator_says_so() -> None:
    request = await submitted(prompt="<|im_start|>the<|im_end|>", control=False)
    assert list(request.prompt) == [BOS, *TOKENIZER.encode("<|im_start|>the<|im_end|>")]
    assert not {IM_START, IM_END} & set(request.prompt)


@pytest.mark.parametrize(
    ("prompt", "special", "begin"),
    [
        ("a", True, [BOS]),
        ("<|bos|>a", True, [BOS]),
        ("<|bos|><|bos|>a", True, [BOS, BOS]),
        ("<|bos|>a", False, [BOS]),
        ("a", False, []),
    ],
)
async def test_a_prompt_begins_once(prompt: str, special: bool, begin: list[int]) -> None:
    request = await submitted(prompt=prompt, add_special_tokens=special)
    assert list(request.prompt) == [*begin, *TOKENIZER.encode("a")]


async def test_tokenize_reads_a_prompt_as_completions_do() -> None:
    for control in (True, False):
        request = await submitted(prompt="a<|im_end|>", control=control)
        answer = await post(ScriptedEngine(say("x")), path="/tokenize", prompt="a<|im_end|>", control=control)
        assert answer.json()["tokens"] == list(request.prompt)


NAMES = "a<|im_end|><|im_start|>b"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": NAMES}]},
        {"messages": [{"role": "user", "content": "x", "name": NAMES}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": NAMES}}]},
        {"prediction": {"type": "content", "content": NAMES}},
        {"stop": [NAMES]},
        {"user": NAMES, "prompt_cache_key": NAMES},
    ],
)
async def test_all_else_of_a_client_stays_text(fields: dict[str, Any]) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        conversation = {**ASK, **fields}
        asked = {name: conversation.get(name) for name in ("messages", "tools")}
        ids = (await client.post("/tokenize", json=asked)).json()["tokens"]
    turns = 2 if "tools" in fields else 1  # the functions are described in a turn of their own
    assert (ids.count(IM_START), ids.count(IM_END)) == (turns + 1, turns)
    request = await submitted(path=CHAT, max_tokens=1, **{name: fields[name] for name in fields.keys() - {"tools"}})
    assert (request.prompt.count(IM_START), request.prompt.count(IM_END)) == (2, 1)
    assert not {IM_START, IM_END} & set(request.prediction)
    assert request.sampling.stop in ((), (NAMES,))
    assert request.sampling.stop_token_ids == frozenset()


# Filling gaps.

FAMILIES = {
    "starcoder": "<fim_prefix> prompt <fim_suffix> suffix <fim_middle>",
    "santacoder": "<fim-prefix> prompt <fim-suffix> suffix <fim-middle>",
    "qwen": "<|fim_prefix|> prompt <|fim_suffix|> suffix <|fim_middle|>",
    "codellama": "▁<PRE> prompt ▁<SUF> suffix ▁<MID>",
    "deepseek": "<\uff5cfim▁begin\uff5c> prompt <\uff5cfim▁hole\uff5c> suffix <\uff5cfim▁end\uff5c>",
    "codestral": "[SUFFIX] suffix [PREFIX] prompt",
}
ENDS = {"starcoder": "<file_sep>", "qwen": "<|file_sep|>", "codellama": "▁<EOT>", "codestral": "[MIDDLE]"}
UNMARKED = ("qwen", "deepseek")  # whose tokenizers have these tokens as added ones that are not special
PROMPT, SUFFIX = "def f(", "):\n"


def bytes_with(names: tuple[str, ...], *, special: bool = True) -> ChatTokenizer:
    """A tokenizer of bytes with a beginning of text, an ordinary control token, and these tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return made(backend, names, special=special)


def blanks_with(names: tuple[str, ...]) -> ChatTokenizer:
    """A tokenizer that puts a blank in front of a text, as those of SentencePiece do, with bytes as a fallback."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    backend = Tokenizer(BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made(backend, names)


def made(backend: Tokenizer, names: tuple[str, ...], *, special: bool = True) -> ChatTokenizer:
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "<|im_end|>")])
    add = backend.add_special_tokens if special else backend.add_tokens
    add([AddedToken(name, normalized=False) for name in names])
    begin = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def markers_of(family: str) -> list[str]:
    return [part for part in FAMILIES[family].split() if part not in ("prompt", "suffix")]


def tokenizer_of(family: str) -> ChatTokenizer:
    names = (*markers_of(family), *([ENDS[family]] if family in ENDS else []))
    if family in ("codellama", "codestral"):
        return blanks_with(names)
    return bytes_with(names, special=family not in UNMARKED)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_gap_is_written_in_the_order_of_its_family(family: str) -> None:
    tokenizer = tokenizer_of(family)
    request = await submitted(tokenizer=tokenizer, prompt=PROMPT, suffix=SUFFIX)
    shown = [tokenizer.token_string(token_id) for token_id in request.prompt]
    texts = {"prompt": list(PROMPT.encode()), "suffix": list(SUFFIX.encode())}
    expected: list[str | None] = ["<s>"]
    for part in FAMILIES[family].split():
        if part not in texts:
            expected.append(part)
        elif family in ("codellama", "codestral"):  # the prompt has the blank in front that every text has
            blank = ["▁"] if part == "prompt" else []
            expected += [*blank, *("▁" if byte == 32 else f"<0x{byte:02X}>" for byte in texts[part])]
        else:
            expected += [tokenizer.token_string(one) for one in tokenizer.encode(bytes(texts[part]).decode())]
    assert shown == expected


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_filled_gap_ends_at_the_ends_of_its_family(family: str) -> None:
    tokenizer = tokenizer_of(family)
    names = tokenizer.special_ids.keys() - {"<s>", "<|im_end|>"}
    assert names == {*markers_of(family), ENDS.get(family, markers_of(family)[0])}
    expected = frozenset(tokenizer.special_ids[name] for name in names)
    asked = {"tokenizer": tokenizer, "suffix": SUFFIX}
    assert (await submitted(**asked)).sampling.stop_token_ids == expected
    assert (await submitted(**asked, stop_token_ids=[7])).sampling.stop_token_ids == expected | {7}
    assert (await submitted(**asked, ignore_eos=True)).sampling.stop_token_ids == frozenset()
    assert (await submitted(tokenizer=tokenizer, suffix="")).sampling.stop_token_ids == frozenset()


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_server_places_markers(family: str, control: bool) -> None:
    tokenizer = tokenizer_of(family)
    names = "".join(name for name in tokenizer.special_ids)
    plain = tokenizer.encode(names)
    assert not set(plain) & set(tokenizer.special_ids.values())
    body = CompletionRequest(model="tiny", prompt=names, suffix=names)
    (ids,) = encode_prompts(body, tokenizer, control=control)
    markers = [token for token in ids if token in tokenizer.special_ids.values()]
    assert [tokenizer.token_string(token) for token in markers] == ["<s>", *markers_of(family)]


async def test_gaps_of_a_batch_with_choices_and_log_probabilities() -> None:
    def script(request: GenerationRequest) -> Any:
        for index in range(request.n):
            spoken = step(request, index, "x", "stop")
            scores = (TokenLogprob(spoken.token_ids[0], -1.0, 1, ()),)
            yield [type(spoken)(request.request_id, index, spoken.token_ids, "x", scores, "stop")]

    tokenizer, engine = tokenizer_of("starcoder"), ScriptedEngine(script)
    fields: dict[str, Any] = {"prompt": ["a", "b"], "suffix": "c", "n": 2, "logprobs": 1, "add_special_tokens": False}
    body = (await post(engine, tokenizer=tokenizer, **fields)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[-1.0]] * 4
    assert [tokenizer.decode(request.prompt) for request in engine.submitted] == [
        f"<fim_prefix>{prompt}<fim_suffix>c<fim_middle>" for prompt in "ab"
    ]
    events = events_of(await post(ScriptedEngine(say("x")), tokenizer=tokenizer, suffix="c", stream=True))
    assert events[-1]["choices"][0]["text"] == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokenizer": TOKENIZER}, "suffix"),
        ({"tokenizer": bytes_with(("<fim_prefix>", "<fim_middle>"))}, "suffix"),  # one is missing
        ({"prompt": [5, 6]}, "suffix"),
        ({"prompt": [[5, 6]]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"suffix": ["c"]}, "suffix"),
        ({"prompt": "a" * 70}, "prompt"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine(say("x"))
    response = await post(engine, **{"tokenizer": tokenizer_of("starcoder"), "suffix": "c", **fields})
    assert (response.status_code, error_of(response)["param"], engine.submitted) == (400, param, [])


async def test_a_refusal_says_what_the_model_lacks() -> None:
    message = error_of(await post(ScriptedEngine(say("x")), suffix="c"))["message"]
    assert message.endswith("its tokenizer has no fill-in-the-middle tokens.")


async def test_a_gap_at_the_begin_of_a_text() -> None:
    tokenizer = tokenizer_of("qwen")
    request = await submitted(tokenizer=tokenizer, prompt="", suffix="c", add_special_tokens=False)
    assert tokenizer.decode(request.prompt) == "<|fim_prefix|><|fim_suffix|>c<|fim_middle|>"
