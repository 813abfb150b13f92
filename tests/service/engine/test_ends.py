"""What ends an answer: everything that a model's files name, and the token with which its template ends a turn."""

import pytest
from tokenizers import AddedToken
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from service.engine.ends import end_token_ids, gguf_end_ids, names_of_ends
from service.errors import StartupError
from tests.service.text.tiny_tokenizer import TEMPLATE, tiny_backend

VOCAB = 300
BOS, IM_START, IM_END = "<|bos|>", "<|im_start|>", "<|im_end|>"


def tokenizer_of(*names: str, template: str | None = None, eos: str | None = None) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with more special tokens."""
    backend = tiny_backend()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, *names: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[name] for name in names]


def ends(
    tokenizer: PreTrainedTokenizerFast,
    *,
    config: int | list[int] | None = None,
    generation: list[int] | None = None,
) -> set[str]:
    """The names of the ends. `config` and `generation`: what each gives as `eos_token_id`."""
    described = LlamaConfig(vocab_size=VOCAB, eos_token_id=config, bos_token_id=None)
    found = end_token_ids(described, GenerationConfig(eos_token_id=generation), tokenizer)
    return set(names_of_ends(found, tokenizer).split())


def test_the_union_of_all_that_name_an_end() -> None:
    names = ("<A>", "<B>", "<C>", "<D>")
    tokenizer = tokenizer_of(*names, eos="<D>")
    a, b, c, _ = ids_of(tokenizer, *names)
    assert ends(tokenizer, config=a, generation=[b, c]) == set(names)
    assert ends(tokenizer, config=[a, b]) == {"<A>", "<B>", "<D>"}


def test_the_tokenizer_alone_names_the_end() -> None:
    assert ends(tokenizer_of(eos=IM_END)) == {IM_END}


def test_an_end_that_the_vocabulary_lacks_is_none() -> None:
    tokenizer = tokenizer_of(*(f"<{number}>" for number in range(VOCAB)), eos="</s>")
    assert ends(tokenizer, config=5, generation=[VOCAB, -1]) == set(names_of_ends([5], tokenizer).split())


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_without_a_name_the_start_ends(template: str | None) -> None:
    with pytest.raises(StartupError, match="eos_token_id"):
        ends(tokenizer_of(template=template))


def turns(user: str, assistant: str, before: str = "", head: str = "") -> str:
    """A template of two kinds of turns, @ for the text."""
    parts = (f"{part}".replace("@", "{{ m.content }}") for part in (user, assistant))
    first, second = parts
    each = f"{{% if m.role == 'user' %}}{first}{{% else %}}{second}{{% endif %}}"
    return f"{head}{{% for m in messages %}}{before}{each}{{% endfor %}}"


LLAMA3 = "<|start_header_id|>{}<|end_header_id|>\n\n@<|eot_id|>"
WITH_SYSTEM = "<|im_start|>system\nHelp.<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, IM_END),
        (turns("<|im_start|>user\n@<|im_end|>", "<|im_start|>assistant\n@<|im_end|>", head=WITH_SYSTEM), IM_END),
        (turns(LLAMA3.format("user"), LLAMA3.format("assistant"), head="<|bos|>"), "<|eot_id|>"),
        (turns("<s>[INST] @ [/INST]", " @ </s>"), "</s>"),
        (turns("[INST] @[/INST]", " @</s>", head="<s>"), "</s>"),
        (turns("User: @</s>\n", "Assistant: @</s>\n", head="System: Help.</s>\n"), "</s>"),
        (turns("<|im_start|>user\n@<|im_end|>", "@{% if not loop.last %}<|eot_id|>{% endif %}"), "<|eot_id|>"),
        (turns("<|user|>@", "<|assistant|>@", head="[gMASK]"), None),  # GLM-4: the config names <|user|>
        (turns("<|im_start|>user\n@\n", "<|im_start|>assistant\n@\n"), None),  # a start is no end
        (turns("<s>[INST] @ [/INST]", " @ "), None),
        (turns("user: @\n", "assistant: @\n"), None),
        ("{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}", None),
        ("{{ raise_exception('only one turn') }}", None),
    ],
)
def test_the_token_that_ends_a_turn_of_the_template(template: str, end: str | None) -> None:
    names = ("</s>", "<s>", "[INST]", "[/INST]", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    tokenizer = tokenizer_of(*names, "<|user|>", "<|assistant|>", "[gMASK]", "<A>", template=template)
    assert ends(tokenizer, config=ids_of(tokenizer, "<A>")) == {"<A>"} | ({end} - {None})


def test_a_word_of_the_template_is_no_end() -> None:
    template = turns("user: @ STOP\n", "assistant: @ STOP\n")
    assert ends(tokenizer_of("<A>", template=template, eos="<A>")) == {"<A>"}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, set()),
        ({"eos": "<x>"}, {"<x>"}),
        ({"eos": "<x>", "eot": "<|im_end|>"}, {"<x>"}),
        ({"eom": "<x>", "bos": "<|bos|>", "padding": "<|im_start|>"}, {"<x>"}),
    ],
)
def test_ends_of_a_gguf_file(stated: dict[str, str], expected: set[str]) -> None:
    """Those that it states, and control tokens with the name of one; <EOT> is a word of this vocabulary."""
    tokenizer = tokenizer_of("<|endoftext|>", "<|eom_id|>", "<x>")
    tokenizer.add_tokens(["<EOT>"])
    fields = {f"tokenizer.ggml.{key}_token_id": ids_of(tokenizer, name)[0] for key, name in stated.items()}
    found = names_of_ends(gguf_end_ids(fields, tokenizer), tokenizer)
    assert set(found.split()) == {IM_END, "<|endoftext|>", "<|eom_id|>"} | expected


def test_an_end_without_a_name_is_shown_by_its_number() -> None:
    tokenizer = tokenizer_of()
    assert names_of_ends([*ids_of(tokenizer, IM_END), 299], tokenizer) == f"{IM_END} 299"
