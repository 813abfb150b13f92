"""Which build of the compiled kernels runs: the best that was built and fits the processor, and only a fresh one."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.cpu import library

CPU = torch.device("cpu")
AVX2 = {"avx2": True, "fma3": True}
ICE_LAKE: dict[str, bool | str] = {**AVX2, "avx512_dq": True, "avx512_vnni": True, "cpu_name": "Intel Xeon"}
SAPPHIRE_RAPIDS: dict[str, bool | str] = {**ICE_LAKE, "avx512_bf16": True}
ZEN_4: dict[str, bool | str] = {**SAPPHIRE_RAPIDS, "cpu_name": "AMD EPYC 9R14"}
ALDER_LAKE: dict[str, bool | str] = {**AVX2, "avx_vnni": True}
ALL = "avx512bf16", "avx512", "avxvnni", "avx2"


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    library.variant.cache_clear()
    yield
    library.variant.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where builds lie, with one source; empty of builds."""
    (tmp_path / "linear.cpp").touch()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    return tmp_path


def build(folder: Path, *names: str) -> None:
    for name in names:
        (folder / f"{name}.so").touch()


def able(monkeypatch: pytest.MonkeyPatch, **abilities: bool | str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)


@pytest.mark.parametrize(
    ("built", "abilities", "expected"),
    [
        (ALL, ZEN_4, "avx512bf16"),
        (ALL, SAPPHIRE_RAPIDS, "avx512"),
        (ALL, ICE_LAKE, "avx512"),
        (ALL, AVX2, "avx2"),
        (ALL, ALDER_LAKE, "avxvnni"),
        (("avx2",), ZEN_4, "avx2"),
        (ALL, {"sse4_2": True}, "torch"),
        (("avx512bf16",), AVX2, "torch"),
        (("neon",), {"neon": True}, "neon"),
        (("neon", "neondot"), {"neon": True, "dot": True}, "neondot"),
        ((), ZEN_4, "torch"),
    ],
)
def test_the_best_build_that_fits_runs(
    built: tuple[str, ...],
    abilities: dict[str, bool | str],
    expected: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(folder, *built)
    able(monkeypatch, **abilities)
    assert ops.kernel_set(CPU) == expected


def test_another_build_runs_where_one_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, *ALL)
    able(monkeypatch, **ZEN_4)
    monkeypatch.setenv("CPU_KERNELS", "avx2")
    assert ops.kernel_set(CPU) == "avx2"
    library.variant.cache_clear()
    monkeypatch.setenv("CPU_KERNELS", "avxvnni")
    with pytest.raises(ImportError, match=r"CPU_KERNELS=avxvnni: .* cannot run it"):
        library.variant()


def test_a_build_older_than_a_source_is_refused_with_the_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder, "avx2")
    able(monkeypatch, **AVX2)
    assert library.variant() == "avx2"
    library.variant.cache_clear()
    (folder / "vector.h").touch()
    os.utime(folder / "avx2.so", (1, 1))
    with pytest.raises(ImportError, match=r"avx2.so is older than linear.cpp, vector.h: .*`make install`"):
        library.variant()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what Linux tells of a process")
def test_the_compiled_kernels_bring_no_openmp() -> None:
    """Its threads would wait for processors that those of other libraries have."""
    found = library.variant()
    assert found is not None, "no kernels are compiled: install g++ and run `make install`"
    needed = subprocess.run(["objdump", "-p", library._path(found)], capture_output=True, text=True, check=True).stdout
    assert "omp" not in needed


INSTRUCTIONS = {
    "avx512bf16": {"zmm", "vpdpbusd", "vdpbf16ps"},
    "avx512": {"zmm", "vpdpbusd"},
    "avxvnni": {"vpdpbusd"},
    "avx2": set[str](),
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86")
@pytest.mark.parametrize("name", ALL)
def test_a_build_holds_the_instructions_it_is_named_for(name: str) -> None:
    """All are compiled at the same time from the same sources: none may be linked from another's objects."""
    built = library._path(name)
    listed = subprocess.run(["objdump", "-d", built], capture_output=True, text=True, check=True).stdout
    assert {one for one in INSTRUCTIONS["avx512bf16"] if one in listed} == INSTRUCTIONS[name]


# Other tests hold with narrower vectors than this machine's: sums and exponentials are rounded otherwise there.

ROOT = Path(__file__).parents[2]
COMPARING = ("tests/drafters", "tests/benchmarks/test_draft_records.py", "tests/service/engine/test_sampling.py")
"""Those that compare floating-point numbers of torch's own operations."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_comparisons_do_not_depend_on_the_width_of_vectors(capability: str) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *COMPARING]
    environment = {**outside, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_memory_of_weights_and_of_pools_is_zeros_of_its_own() -> None:
    areas = [*map(library.weight_memory, (100, 5000, 1 << 26)), library.pool_memory((2, 3, 5), torch.bfloat16, CPU)]
    assert not any(one.data_ptr() % 64 or bool(one.any()) for one in areas)
    for number, one in enumerate(areas):
        one.fill_(number)
    assert [one.unique().tolist() for one in areas] == [[0], [1], [2], [3]]
