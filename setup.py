"""Compiles kernels/cpu, once per kind of processor; everything else about the package stands in pyproject.toml.

The kernels are no modules of Python, so one wheel serves all its versions."""

import os
import platform
from copy import copy
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# `contract=fast` fuses a product and a sum within a basic block only: kernels keep them together, or rows lose equal
# bits. No `-march=native`, so that one wheel serves every machine.
# Integers wrap, which most Pythons ask for, too: without it the same text of a GGUF model came out with other bits.
# No debug information, which Python's own flags ask for; no vectors that a processor has no registers for.
FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-fPIC", "-fwrapv", "-ffp-contract=fast", "-Wall", "-Wno-psabi"]
FLAGS += ["-Werror=vector-operation-performance"]
VARIANTS = {
    "x86_64": {
        "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"],
        "avx512": ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"],
        "avxvnni": ["-march=x86-64-v3", "-mavxvnni"],
        "avx2": ["-march=x86-64-v3"],
    },
    "aarch64": {"neondot": ["-march=armv8.2-a+dotprod"], "neon": ["-march=armv8.2-a"]},
}


class BuildEach(build_ext):
    """Builds compile the same sources, at the same time: each has a folder for its objects."""

    def build_extension(self, ext):
        own = copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildEach, own).build_extension(ext)

    def get_ext_filename(self, fullname):
        """`kernels/cpu/library.py` opens this file: its name says no version of Python."""
        return f"{fullname.replace('.', '/')}.so"


class AnyPython(bdist_wheel):
    """A wheel for one platform and every version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildEach, "bdist_wheel": AnyPython},
    ext_modules=[
        # No modules of Python: kernels/cpu/library.py loads them by their C interface.
        Extension(
            f"kernels.cpu.{variant}",
            sources=sorted(glob("kernels/cpu/*.cpp")),
            depends=sorted(glob("kernels/cpu/*.h")),
            language="c++",
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            optional=True,  # without a compiler the torch reference serves
        )
        for variant, flags in VARIANTS.get(platform.machine(), {}).items()
    ],
    options={"build_ext": {"parallel": os.cpu_count()}},
)
