"""The text of an answer is what the tokenizer makes of prompt and answer, less what it makes of the prompt."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput, TokenLogprob
from service.engine.sequence import TextStream
from service.errors import StartupError
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import TEXT, client_of
from tests.service.scripted import CARD, ScriptedEngine, step
from tests.service.text.tokenizer_kinds import KINDS, ids_of

PIECES = KINDS["sentencepiece"]

some_text = st.text("ab éü日🦊\n<0x", max_size=12)


def defined(tokenizer: ChatTokenizer, prompt: Sequence[int], answer: Sequence[int], *, skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    same = next((at for at, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before))
    return whole[same:]


def random_tokens(tokenizer: ChatTokenizer, random: Random, most: int) -> list[int]:
    """Random ids: any, or mostly those of bytes, which seldom are characters, or bytes of characters."""
    special, ordinary = sorted(tokenizer.skipped_ids), range(tokenizer.vocab_size)
    bytes_ = sorted(tokenizer.byte_ids) or list(range(100, 256))
    among = random.choice([ordinary, bytes_, [*bytes_, *special], [*ordinary[-30:], *bytes_[:20]]])
    ids = random.choices(among, k=random.randint(0, most))
    if random.random() < 0.3:
        text = "".join(random.choices("aé日🦊 \n", k=5))
        ids[random.randint(0, len(ids)) :] = tokenizer.encode(text)
    return ids


def check_any(tokenizer: ChatTokenizer, random: Random) -> None:
    """Any answer after any prompt, in pieces of any length, is its definition, and so is what was sent before."""
    skip, prompt = random.random() < 0.5, random_tokens(tokenizer, random, random.choice([0, 1, 3, 40]))
    answer = random_tokens(tokenizer, random, random.choice([3, 12, 60]))
    detokenizer, shown, start = tokenizer.detokenizer(skip, prompt), "", 0
    expected = defined(tokenizer, prompt, answer, skip=skip)
    while start < len(answer):
        length = random.choice([1, 1, 1, 2, 5])
        shown += detokenizer.push(*answer[start : start + length])
        start += length
        assert expected.startswith(shown), (prompt, answer)
        held = detokenizer.held
        assert shown + held == defined(tokenizer, prompt, answer[:start], skip=skip) or "\ufffd" in shown + held
    assert shown + detokenizer.held == expected, (prompt, answer)


def check_kind(kind: str, cases: int, seed: int) -> None:
    random = Random(seed)
    for _ in range(cases):
        check_any(KINDS[kind], random)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_any_answer_join_to_its_text(kind: str) -> None:
    check_kind(kind, 2_000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_very_many_answers_join_to_their_texts(kind: str, sized: Callable[[int], int]) -> None:
    check_kind(kind, sized(100_000) // len(KINDS), seed=2)


@pytest.mark.parametrize("kind", KINDS)
@given(before=some_text, text=some_text)
def test_tokens_have_the_bytes_of_the_text_and_say_where_it_is(kind: str, before: str, text: str) -> None:
    tokenizer = KINDS[kind]
    prompt, ids = tokenizer.encode(before), tokenizer.encode(text)
    ids = [token for token in ids if token not in tokenizer.skipped_ids]  # what is unknown has no text
    expected = defined(tokenizer, prompt, ids, skip=True).encode()
    detokenizer, sent, raw = tokenizer.detokenizer(True, prompt), 0, b""
    for token in ids:
        assert sent + detokenizer.num_held_before(token) == len(raw.decode(errors="ignore"))
        raw += tokenizer.token_bytes(token, at_start=detokenizer.is_at_start)
        sent += len(detokenizer.push(token))
    assert raw == expected


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_never_go_back(kind: str) -> None:
    tokenizer, random = KINDS[kind], Random(3)
    for _ in range(200):
        detokenizer, sent, last = tokenizer.detokenizer(True), 0, 0
        for token in random_tokens(tokenizer, random, 40):
            before, last = last, sent + detokenizer.num_held_before(token)
            assert before <= last
            sent += len(detokenizer.push(token))
        assert last <= sent + len(detokenizer.held)


async def test_tokens_of_a_completion_join_to_the_text_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, vocab_size=PIECES.vocab_size))
    prompt = ids_of(PIECES, ["▁ab", "<0xE6>", "<0x97>", "<0xA5>", "▁a"])
    answer = ids_of(PIECES, ["▁b", "<0xC3>", "<0xA9>", "<0x0A>", "▁ab", "</s>"])
    scores = tuple(TokenLogprob(token, -2.0, 1, ()) for token in prompt[1:])

    def script(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        detokenizer = PIECES.detokenizer(True, request.prompt)
        for place, token in enumerate(answer):
            last = place == len(answer) - 1
            output = step(request, 0, "", "stop" if last else None)
            scored = (TokenLogprob(token, -1.0, 1, ()),)
            text = detokenizer.push(token) + (detokenizer.held if last else "")
            prompt_scores = () if place else scores
            yield [replace(output, token_ids=(token,), text=text, logprobs=scored, prompt_logprobs=prompt_scores)]

    body = {"model": "tiny", "prompt": prompt, "logprobs": 1, "echo": True}
    async with client_of(ScriptedEngine(script), tokenizer=PIECES) as client:
        whole = (await client.post(TEXT, json=body)).json()["choices"][0]
    assert whole["text"] == "ab日 a bé\n ab"
    found = whole["logprobs"]
    assert found["tokens"][:1] + found["tokens"][4:6] + found["tokens"][8:] == ["ab", " a", " b", "\n", " ab", "</s>"]
    assert found["text_offset"] == [0, 2, 2, 2, 3, 5, 7, 7, 8, 9, 12]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"byte-level"}))
def test_a_word_after_a_prompt_keeps_its_blank(kind: str) -> None:
    tokenizer = KINDS[kind]
    special, letter, word = ids_of(tokenizer, ["<s>", "a", "▁ab"])
    first = " ab" if "without prefix" in kind else "ab"
    for prompt, skip, expected in (
        ([], True, first),
        ([special], True, first),
        ([special], False, " ab"),
        ([letter, special], True, " ab"),
        ([word] * 9, True, " ab"),
    ):
        detokenizer = tokenizer.detokenizer(skip, prompt)
        assert tokenizer.token_text(word, at_start=detokenizer.is_at_start) == expected
        assert [detokenizer.push(word), detokenizer.push(word)] == [expected, " ab"]


def test_bytes_become_characters_when_they_are_complete_or_no_character() -> None:
    letter, *bytes_ = ids_of(PIECES, ["a", "<0x0A>", "<0xE6>", "<0x97>", "<0xA5>", "<0xFF>"])
    newline, *sun, wrong = bytes_
    detokenizer = PIECES.detokenizer(True, [letter])
    pieces = [detokenizer.push(token) for token in (*sun, letter, newline, letter, wrong, sun[0], letter)]
    assert pieces == ["", "", "", "日a", "", "\na", "", "", "\ufffd\ufffda"]
    assert [detokenizer.push(sun[0]), detokenizer.held] == ["", "\ufffd"]


def stream(tokenizer: ChatTokenizer, *stop: str, min_tokens: int = 0) -> TextStream:
    params = SamplingParams(seed=0, max_tokens=99, stop=stop, min_tokens=min_tokens)
    return TextStream(tokenizer.detokenizer(True, tokenizer.encode("a")), params)


def test_a_stop_string_of_byte_tokens_ends_the_text_at_once() -> None:
    letter, newline, half = ids_of(PIECES, ["b", "<0x0A>", "<0xE6>"])
    text = stream(PIECES, "\n")
    assert [text.push(token) for token in (letter, newline)] == [None, "\n"]
    assert text.finish() == "b"
    free = stream(PIECES, "\n", min_tokens=2)
    assert [free.push(token) for token in (letter, newline, letter, newline)] == [None, None, None, "\n"]
    assert free.finish() == "b\nb"
    broken = stream(PIECES, "\n")
    assert [broken.push(token) for token in (half, newline, letter)] == [None, None, None]
    assert broken.finish() == "\ufffd\ufffdb"


def test_a_model_without_rows_for_all_tokens_is_refused_and_ids_without_tokens_are_found() -> None:
    size = PIECES.vocab_size
    PIECES.refuse_narrow_vocabulary(size)
    assert PIECES.unknown_ids(size) == []
    assert PIECES.unknown_ids(size + 2) == [size, size + 1]
    with pytest.raises(StartupError, match=rf"2 tokens beyond .* {size - 2}, the first '  x' \({size - 2}\)"):
        PIECES.refuse_narrow_vocabulary(size - 2)
