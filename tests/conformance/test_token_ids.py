"""Token ids of a GGUF file's tokenizer are those of llama.cpp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaConfig

from service.text.tokenizer import ChatTokenizer
from tests.conformance.gguf_writer import Value, contents
from tests.conformance.judges import LlamaCpp, loaded
from tests.conformance.vocabularies import PRE_TOKENIZERS, byte_pairs, sentence_pieces, texts

pytestmark = pytest.mark.slow("llama.cpp is installed first", covers="service/engine service/text tests/conformance")
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def assert_same_ids(keys: dict[str, Value], file: Path, llama_cpp: LlamaCpp) -> None:
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    config = LlamaConfig(vocab_size=len(tokens), max_position_embeddings=64, **SIZES)
    contents(AutoModelForCausalLM.from_config(config), "llama", Kind.F32, keys).write(file)
    tokenizer = ChatTokenizer(loaded(file, torch.float32).tokenizer)
    found = [tokenizer.encode(text) for text in texts()]
    expected = llama_cpp.token_ids(file, texts())
    assert isinstance(expected, list)
    wrong = [
        (text, ours, theirs) for text, ours, theirs in zip(texts(), found, expected, strict=True) if ours != theirs
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} texts: {wrong[0]}"


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_pairs(pre: str, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    assert_same_ids(byte_pairs(pre), tmp_path / "a.gguf", llama_cpp)


@pytest.mark.parametrize(("prefix", "merged"), [(True, False), (False, False), (False, True)])
def test_sentence_pieces(prefix: bool, merged: bool, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    assert_same_ids(sentence_pieces(1200, prefix=prefix, merged=merged), tmp_path / "a.gguf", llama_cpp)
