import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.engine.requests import SamplingParams
from service.engine.sequence import TextStream
from service.tokenizer import ChatTokenizer
from tests.service.tiny_tokenizer import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())

few_letters = st.text("aboä", max_size=24)
stops = st.lists(st.text("aboä", min_size=1, max_size=4), max_size=4).map(tuple)


def stream(stop: tuple[str, ...], *, include_stop: bool = False, min_tokens: int = 0) -> TextStream:
    params = SamplingParams(
        seed=0, max_tokens=99, stop=stop, include_stop_str_in_output=include_stop, min_tokens=min_tokens
    )
    return TextStream(TOKENIZER.detokenizer(True), params)


def run(text_stream: TextStream, ids: list[int], *, take_every: int = 1) -> tuple[list[str], str | None]:
    """What is shown, piece by piece, and the stop string that ended it."""
    shown, stopped_by = [], None
    for number, token_id in enumerate(ids):
        stopped_by = text_stream.push(token_id)
        if stopped_by is not None:
            break
        if number % take_every == 0:
            shown.append(text_stream.take())
    return [*shown, text_stream.take(), text_stream.finish()], stopped_by


def cut_at_first_stop(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The definition, character by character: the stop string that ends first, of those the longest."""
    for end in range(len(text) + 1):
        if ending := [candidate for candidate in stop if text[:end].endswith(candidate)]:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@given(few_letters, stops, st.booleans(), st.integers(1, 4))
@example("abab", ("ab", "b"), False, 1)
@example("aob", ("aobo", "ob"), False, 1)
def test_the_pieces_join_to_the_text_up_to_the_first_stop(
    text: str, stop: tuple[str, ...], include_stop: bool, take_every: int
) -> None:
    shown, stopped_by = run(stream(stop, include_stop=include_stop), TOKENIZER.encode(text), take_every=take_every)
    assert ("".join(shown), stopped_by) == cut_at_first_stop(text, stop, include_stop)


@given(few_letters, stops)
def test_what_is_shown_can_never_be_taken_back(text: str, stop: tuple[str, ...]) -> None:
    final, _ = cut_at_first_stop(text, stop, include_stop=False)
    shown, _ = run(stream(stop), TOKENIZER.encode(text))
    so_far = ""
    for piece in shown:
        so_far += piece
        assert final.startswith(so_far)


@given(few_letters, stops)
def test_nothing_is_held_back_without_need(text: str, stop: tuple[str, ...]) -> None:
    text_stream, whole = stream(stop), ""
    detokenizer = TOKENIZER.detokenizer(True)
    for token_id in TOKENIZER.encode(text):
        whole += detokenizer.push(token_id)
        if text_stream.push(token_id) is not None:
            return
        text_stream.take()
        held = text_stream._pending
        assert whole.endswith(held)
        assert held == "" or any(candidate.startswith(held) for candidate in stop)


@given(few_letters, st.text("aboä", min_size=1, max_size=3), st.integers(0, 8))
def test_stop_strings_that_end_in_the_first_min_tokens_are_ignored(text: str, stop: str, min_tokens: int) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = TOKENIZER.detokenizer(True)
    free = len("".join(detokenizer.push(token_id) for token_id in ids[:min_tokens]))
    ends = [end for end in range(free + 1, len(text) + 1) if text[:end].endswith(stop)]
    expected = text[: ends[0] - len(stop)] if ends and len(ids) > min_tokens else text
    text_stream = stream((stop,), min_tokens=min_tokens)
    assert "".join(run(text_stream, ids, take_every=1000)[0]) == expected


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "hello w"), (True, "hello wthe")])
def test_a_stop_string_inside_of_a_token_and_across_tokens(include_stop: bool, expected: str) -> None:
    ids = [*TOKENIZER.encode("hello w"), *TOKENIZER.encode("t"), *TOKENIZER.encode("he"), *TOKENIZER.encode("re")]
    shown, stopped_by = run(stream(("the",), include_stop=include_stop), ids)
    assert ("".join(shown), stopped_by) == (expected, "the")
    assert run(stream(("ell",)), TOKENIZER.encode("hello")) == (["h", ""], "ell")


def test_pushing_after_a_stop_is_a_bug() -> None:
    text_stream = stream(("a",))
    assert text_stream.push(TOKENIZER.encode("a")[0]) == "a"
    with pytest.raises(AssertionError):
        text_stream.push(TOKENIZER.encode("b")[0])
