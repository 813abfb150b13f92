"""Files with one fault are refused by the name of what is wrong, or are what the judge reads in the same file."""

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from service.errors import StartupError
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.conformance.fuzzing import Fault, faulty_folder, faulty_gguf
from tests.conformance.gguf_writer import Contents, contents
from tests.conformance.judges import TEXTS, LlamaCpp, distance, loaded, our_scores, scores_of
from tests.conformance.measures import tokenizer_keys
from tests.tiny_models import stock

FEW, MANY = 30, 1000
SHORT = [TEXTS[0][:200]]  # beyond windows and trained positions
APART = 0.05  # nats per token between llama.cpp and ours, in Q8_0
ROUNDED = 1e-6  # the same between transformers and ours, in float32
FILES = [one for one in CHECKPOINTS if one.gguf and not one.left_out]
FOLDERS = [one for one in CHECKPOINTS if one.config.get("num_hidden_layers", 2) == 2 and not one.within]
COUNTS = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
JUDGED = pytest.mark.slow("llama.cpp is installed first", covers="service/engine tests/conformance")


@cache
def whole_file(checkpoint: Checkpoint) -> Contents:
    return contents(made(checkpoint), checkpoint.gguf, Kind.Q8_0, tokenizer_keys(checkpoint.gguf))


def loads(fault: Fault, source: Path) -> torch.Tensor | None:
    """Our scores; None where the fault is refused by name."""
    found, spoken = None, ""
    try:
        found = our_scores(loaded(source, torch.float32, in_blocks=True), SHORT)
    except StartupError as error:
        spoken = str(error)
    assert fault.may_load if found is not None else fault.is_refused_by(spoken), f"{fault}: {spoken or 'is loaded'}"
    return found


def all_hold(check: Callable[[int], None], count: int) -> None:
    failures = list[str]()
    for number in range(count):
        try:
            check(number)
        except Exception as error:  # whatever leaves `load_model` is one
            failures.append(f"{number}: {error!r}".splitlines()[0])
    assert not failures, "\n".join([f"{len(failures)} of {count}", *failures[:40]])


@JUDGED
@COUNTS
def test_gguf_files(count: int, llama_cpp: LlamaCpp, tmp_path: Path, sized: Callable[[int], int]) -> None:
    def check(number: int) -> None:
        file = tmp_path / f"{number}.gguf"  # another each time: the last one may still be mapped
        fault = faulty_gguf(whole_file(FILES[number % len(FILES)]), file, random.Random(number))
        found = loads(fault, file)
        if found is not None:
            far = distance(found, llama_cpp.scores(file, SHORT))
            assert far.mean <= APART, f"{fault}: {far}"
        file.unlink()

    all_hold(check, sized(count))


@COUNTS
def test_folders(count: int, tmp_path: Path, sized: Callable[[int], int]) -> None:
    def check(number: int) -> None:
        checkpoint, folder = FOLDERS[number % len(FOLDERS)], tmp_path / f"changed {number}"
        source = tmp_path / str(checkpoint)
        if not source.exists():
            save(made(checkpoint), source, within=checkpoint.within)
        fault = faulty_folder(source, folder, random.Random(number))
        found = loads(fault, folder)
        if found is not None:
            far = distance(found, scores_of(stock(folder), SHORT))
            assert far.mean <= ROUNDED, f"{fault}: {far}"
        shutil.rmtree(folder)

    all_hold(check, sized(count))
