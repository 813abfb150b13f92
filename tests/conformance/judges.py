"""Who judges: transformers in float32, and llama.cpp; and how far scores are from a judge's."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quantize
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

from drafters.tree import DraftTree
from kernels.rows import ExtendRows
from service.engine.kv_pool import SlotPool
from service.engine.rows import RowLayout
from service.engine.target import Target
from service.engine.weights import LoadedModel, describe, load_model
from tests.conformance.checkpoints import POSITIONS
from tests.conformance.gguf_writer import Array
from tests.environments import python_environment
from tests.service.engine.harness import tiny_target
from tests.tiny_models import random_prompts

HERE = Path(__file__).parent
Texts = Sequence[Sequence[int]]
TEXTS: Texts = tuple(random_prompts(6, POSITIONS, seed=7))
CHUNK = 128  # of a prompt, as the engine reads it


class Distance(NamedTuple):
    """Kullback-Leibler divergence from the judge's next-token distributions, in nats per token."""

    mean: float
    worst: float  # at the worst position of a text, in the mean of the texts

    def __str__(self) -> str:
        return f"{self.mean:.1e} ({self.worst:.1e})"


class Refused(Exception):
    """llama.cpp does not load a file."""


class LlamaCpp:
    """llama.cpp in a process of its own, started again after an assertion of it failed."""

    def __init__(self) -> None:
        self._python = python_environment(HERE / "xllamacpp.txt") / "bin" / "python"
        self._process: subprocess.Popen[str] | None = None

    def scores(self, file: Path, texts: Texts = TEXTS) -> Tensor:
        """Scores of all tokens after each position. # -> [texts, positions, vocab]"""
        with tempfile.NamedTemporaryFile() as out:
            self._ask("logits", file=str(file), texts=texts, out=out.name)
            return torch.from_numpy(np.fromfile(out.name, np.float32)).view(len(texts), len(texts[0]), -1)

    def token_ids(self, file: Path, texts: Sequence[str]) -> object:
        """Token ids of each text."""
        return self._ask("token_ids", file=str(file), texts=list(texts))

    def quantised(self, data: Array, kind: Kind) -> Array:
        """A matrix in blocks, by llama.cpp where the gguf package cannot. # [rows, columns] -> [rows, bytes]"""
        if not kind.name.endswith("_K"):
            return quantize(data, kind)
        columns, size = GGML_QUANT_SIZES[kind]
        rows, width = data.shape
        with tempfile.NamedTemporaryFile() as source, tempfile.NamedTemporaryFile() as out:
            np.ascontiguousarray(data, np.float32).tofile(source.name)
            self._ask("quantise", kind=int(kind), rows=rows, columns=width, source=source.name, out=out.name)
            return np.fromfile(out.name, np.uint8).reshape(rows, width // columns * size)

    def _ask(self, call: str, **arguments: object) -> object:
        if self._process is None or self._process.poll() is not None:
            command = [self._python, HERE / "llama_cpp_process.py"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([call, arguments]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._process.communicate()
            raise Refused("an assertion failed")
        found = json.loads(answer)
        if "error" in found:
            raise Refused(found["error"])
        return found["result"]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@torch.inference_mode()
def scores_of(model: PreTrainedModel, texts: Texts = TEXTS) -> Tensor:
    """Scores by transformers. # -> [texts, positions, vocab]"""
    return torch.cat([model(torch.tensor([text])).logits for text in texts])


def loaded(
    source: Path, dtype: torch.dtype, *, in_blocks: bool = False, max_model_len: int | None = None
) -> LoadedModel:
    """Load a folder or a file as the server does."""
    described = describe(str(source), revision=None, unverified=True, max_model_len=max_model_len)
    return load_model(described, dtype=dtype, device=torch.device("cpu"), in_blocks=in_blocks)


def our_scores(model: LoadedModel, texts: Texts = TEXTS) -> Tensor:
    """Scores by the engine's target, chunk by chunk. # -> [texts, positions, vocab]"""
    target = tiny_target(model, num_slots=len(texts[0]) + 1)
    return torch.stack([_score(target, text) for text in texts])


def _score(target: Target, text: Sequence[int]) -> Tensor:
    table, slots = target.pool.table(1, len(text)), SlotPool(target.pool.num_slots, target.device)
    layout, found = RowLayout(slots, table), list[Tensor]()
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK]
        extends = [ExtendRows(0, start, chunk, completes=True)]
        rows = layout(extends, DraftTree.empty(1))
        scored = target.forward(rows, table, torch.arange(len(chunk))).scored
        assert scored is not None
        found.append(scored)
        if table.states is not None:
            table.states.advance(extends)
    return torch.cat(found)


def distance(found: Tensor, judge: Tensor) -> Distance:
    """Return how far scores are from the judge's, of the texts that were scored. # both [texts, positions, vocab]"""
    theirs, ours = judge[: len(found)].double().log_softmax(-1), found.double().log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    return Distance(float(divergence.mean()), float(divergence.amax(-1).mean()))
