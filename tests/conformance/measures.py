"""How far our scores of a checkpoint are from the judge's, beside another engine's, and with each option dropped."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from service.assembly import default_dtype
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.conformance.gguf_writer import Value, contents, read_back
from tests.conformance.judges import TEXTS, Distance, LlamaCpp, Texts, distance, loaded, our_scores, scores_of
from tests.conformance.vocabularies import sentence_pieces, tiny_byte_pairs
from tests.tiny_models import stock

TIMES = 1.5  # as far from the judge as the other engine may ours be
FLOOR = 1e-8  # nats; float32 sums in another order are as far from the judge, which is transformers in float32
SHOWN = 10  # by how many times the bound a dropped option is to be missed
_PIECES = ("gemma", "gemma2", "gemma3", "gemma4", "phi3")  # have SentencePiece


class Form(NamedTuple):
    """How a folder's weights are saved, and the type in which they are served."""

    saved: torch.dtype
    served: torch.dtype
    sharded: bool = False


FORMS = {
    "float32": Form(torch.float32, torch.float32),
    "float16": Form(torch.float16, torch.bfloat16),
    "bfloat16 in parts": Form(torch.bfloat16, torch.bfloat16, sharded=True),
}


KINDS = {"F16": Kind.F16, "Q8_0": Kind.Q8_0, "Q4_K": Kind.Q4_K, "Q6_K": Kind.Q6_K}
"""Types of a GGUF file's matrices."""


def kinds_of(checkpoint: Checkpoint) -> Mapping[str, Kind]:
    """Types in which files of a checkpoint's family come; MXFP4 is that of experts alone."""
    return KINDS | ({"MXFP4": Kind.MXFP4} if checkpoint.gguf == "gpt-oss" else {})


@dataclass(frozen=True, slots=True)
class Figure:
    """Distances from the judge."""

    ours: Distance
    theirs: Distance
    dropped: Mapping[str, Distance]

    def assert_conforms(self) -> None:
        """Ours is as near as theirs, and dropping any option would have been seen."""
        pairs = zip(self.ours, self.theirs, strict=True)
        assert all(ours <= TIMES * theirs + FLOOR for ours, theirs in pairs), f"ours {self.ours}, theirs {self.theirs}"
        bound = TIMES * self.theirs.mean + FLOOR
        unseen = {name: far for name, far in self.dropped.items() if far.mean < SHOWN * bound}
        assert not unseen, f"{unseen} are not {SHOWN} times {bound:.1e}"


def of_folder(checkpoint: Checkpoint, form: Form, folder: Path, *, options: bool = True) -> Figure:
    """Measure a safetensors folder; the other engine is transformers in the same type."""
    model = made(checkpoint)
    saved = save(model, folder / "whole", form.saved, sharded=form.sharded, within=checkpoint.within)
    judge = scores_of(stock(saved))
    theirs = scores_of(stock(saved, form.served))
    dropped = {}
    for name in checkpoint.options if options else ():
        other = save(made(checkpoint, name), folder / name, form.saved, within=checkpoint.within)
        dropped[name] = distance(our_scores(loaded(other, form.served), TEXTS[:1]), judge)
    return Figure(distance(our_scores(loaded(saved, form.served)), judge), distance(theirs, judge), dropped)


def of_file(checkpoint: Checkpoint, kind: Kind, folder: Path, llama_cpp: LlamaCpp, *, options: bool = True) -> Figure:
    """Measure a GGUF file as it is served by default; the other engine is llama.cpp."""

    def read(*without: str) -> PreTrainedModel:
        return read_back(file, checkpoint.described(*without), checkpoint.gguf, torch.float32)

    def ours(source: Path, texts: Texts = TEXTS) -> torch.Tensor:
        return our_scores(loaded(source, default_dtype(torch.device("cpu")), in_blocks=True), texts)

    file = written(made(checkpoint), checkpoint.gguf, kind, folder / "whole.gguf", llama_cpp)
    judge, dropped = scores_of(read()), {}
    for number, name in enumerate(checkpoint.options if options else ()):
        other = written(made(checkpoint, name), checkpoint.gguf, kind, folder / f"{number}.gguf", llama_cpp)
        stated = other.read_bytes() != file.read_bytes()  # else readers know it of the architecture
        dropped[name] = distance(ours(other, TEXTS[:1]) if stated else scores_of(read(name), TEXTS[:1]), judge)
    # llama.cpp is measured as the model that it runs.
    model = scores_of(read(*checkpoint.options)) if checkpoint.left_out else judge
    return Figure(distance(ours(file), judge), distance(llama_cpp.scores(file), model), dropped)


def written(model: PreTrainedModel, arch: str, kind: Kind, file: Path, llama_cpp: LlamaCpp) -> Path:
    """Write a model as GGUF with a tokenizer of its family's kind."""
    return contents(model, arch, kind, tokenizer_keys(arch), llama_cpp.quantised).write(file)


@cache  # training does not settle ties between pairs in the same way each time
def tokenizer_keys(arch: str) -> dict[str, Value]:
    """Keys of a tokenizer of the kind that files of an architecture have."""
    is_gemma4 = arch == "gemma4"
    return sentence_pieces(prefix=not is_gemma4, merged=is_gemma4) if arch in _PIECES else tiny_byte_pairs()


def small() -> list[Checkpoint]:
    """One checkpoint of each type of model, alone and within another, with the most options."""
    ordered = sorted(CHECKPOINTS, key=lambda one: -len(one.options))
    return list({(one.model_type, one.within): one for one in reversed(ordered)}.values())
