"""`adaptree doctor`: runs the checks of a start on this machine, with the same messages, without loading weights."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import httpx
import torch

from kernels import ops
from service import __version__
from service.api.connections import listen
from service.assembly import NO_KERNELS, device_of, dtype_of, limits_of
from service.config import GIB, ServiceConfig, check_writable
from service.drafter import choose_drafter, drafter_needs, source_of
from service.engine.checks import VERIFIED, text_bytes
from service.engine.ends import names_of_ends
from service.engine.gguf_reader import part_paths
from service.engine.kv_pool import KVShape
from service.engine.measuring import processor_name
from service.engine.memory_planner import check_free_memory, room_for, running_states
from service.engine.shards import shared_spec
from service.engine.weights import Described, describe, gguf_file, kv_layers
from service.errors import StartupError
from service.follow import refuse_sharing
from service.learning.auto import Facts, decide, kept_facts
from service.text.tokenizer import ChatTokenizer

_ANSWER_SECONDS = 2.0  # a probe takes milliseconds, but the server may be busy


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: what was found, or the problem and its remedy."""

    subject: str
    text: str
    is_problem: bool = False


def findings(config: ServiceConfig) -> Iterator[Finding]:
    """Run all checks of this configuration. A problem that several checks find is yielded once."""
    problems = set[str]()
    for subject, check in _CHECKS.items():
        try:
            yield Finding(subject, check(config))
        except StartupError as error:
            if str(error) not in problems:
                problems.add(str(error))
                yield Finding(subject, str(error), is_problem=True)


def show(config: ServiceConfig) -> bool:
    """Print what each check finds, one line each. Returns whether a server can start as configured."""
    print(f"adaptree {__version__}")
    problems = 0
    for one in findings(config):
        problems += one.is_problem
        print(f"{'problem' if one.is_problem else 'ok':9}{one.subject:11}{one.text}")
    print(f"{problems} problem(s) to solve first" if problems else "no problem found: start with `adaptree serve`")
    return not problems


def _processor(config: ServiceConfig) -> str:
    device = device_of(config.device)
    kernels = ops.kernel_set(device)
    if kernels == "torch":
        raise StartupError(f"{processor_name()}: kernels {NO_KERNELS}; until then plain torch is used, which is slower")
    return f"{processor_name()}, {os.cpu_count()} logical cores; kernels: {kernels}"


def _torch(config: ServiceConfig) -> str:
    return f"{torch.__version__} on Python {platform.python_version()}, {config.num_threads} threads"


def _device(config: ServiceConfig) -> str:
    device, size = device_of(config.device), config.tensor_parallel
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu: no GPU is used"
    if size == 1:
        return name
    refuse_sharing(device)
    shared_spec(_target(config).config, size)
    return f"{name}; the model is shared by {size} processes with {config.num_threads} threads each"


@cache  # three checks read it
def _described(name: str, revision: str | None, unverified: bool) -> Described:
    return describe(name, revision=revision, unverified=unverified)


def _target(config: ServiceConfig) -> Described:
    return _described(config.model_source, config.revision, config.unverified)


def _model(config: ServiceConfig) -> str:
    family = _target(config).config.get_text_config().model_type
    return f"{config.model_source}: {family}{'' if family in VERIFIED else ', unverified'}"


def _ends(config: ServiceConfig) -> str:
    target = _target(config)
    return names_of_ends(target.eos_token_ids, target.tokenizer)


def _template(config: ServiceConfig) -> str:
    tokenizer = ChatTokenizer(_target(config).tokenizer)
    if tokenizer.chat_template is None:
        return "none: only /v1/completions works"
    return tokenizer.traits(with_tools=True).described


def _drafter(config: ServiceConfig) -> str:
    name, folder = choose_drafter(config, starts=True)
    return name if folder is None else f"{name} in {folder}"


def _learning(config: ServiceConfig) -> str:
    name, folder = choose_drafter(config, starts=True)
    at_first = Facts("weights" in drafter_needs(name), drafts=folder is not None)
    return decide(config, kept_facts(config) or at_first)[1]


def _memory(config: ServiceConfig) -> str:
    device = device_of(config.device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{free / GIB:.1f} of {total / GIB:.1f} GiB of the GPU are free"
    name, folder = choose_drafter(config, starts=True)
    drafter = config.drafter_path if "model" in drafter_needs(name) else folder
    loaded = {source_of(config), *([str(drafter.expanduser().resolve())] if drafter else ())}  # perhaps the same
    text = _target(config).config.get_text_config()
    limits = limits_of(config, text.max_position_embeddings)
    shape = KVShape(kv_layers(text), dtype_of(config, device))
    running = shape.state_bytes(running_states(shape, limits))
    pool_bytes = config.kv_cache_bytes("cpu", 0, states_bytes=running)
    taken = check_free_memory(sum(map(_weight_bytes, loaded)), pool_bytes)
    room = room_for(shape, pool_bytes, limits)
    states = f", {shape.state_bytes(room.states) / GIB:.2f} GiB" if shape.bytes_per_state else ""
    return f"{taken}; the KV cache holds {room.described}{states}"


def _weight_bytes(model: str) -> int:
    """Return the bytes of what is loaded of a model's or a drafter's files, or 0 for those on the hub, which are not
    downloaded for this."""
    if (file := gguf_file(model)) is None:
        return text_bytes(Path(model).expanduser().glob("*.safetensors"))
    return sum(one.stat().st_size for one in part_paths(file))


def _state_dir(config: ServiceConfig) -> str:
    check_writable(config.state_dir)
    size = sum(file.stat().st_size for file in config.state_dir.rglob("*") if file.is_file())
    return f"{config.state_dir}, {size / GIB:.2f} GiB"


def _port(config: ServiceConfig) -> str:
    try:
        listen(config.host, config.port).close()
    except StartupError as error:
        raise StartupError(f"{error}{_serving_there(config)}") from error
    return f"{config.host}:{config.port} is free"


def _serving_there(config: ServiceConfig) -> str:
    """Describe an adaptree server at the configured address, as the end of a message; empty if none is ready there."""
    host = "127.0.0.1" if config.host in ("", "0.0.0.0", "::") else config.host
    try:
        url = httpx.URL(scheme="http", host=host, port=config.port, path="/readyz")
        parts = httpx.get(url, timeout=_ANSWER_SECONDS).json()["switched_off"]
    except (httpx.HTTPError, ValueError, TypeError, KeyError):
        return ""
    since = [f"{part} (since {datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M})" for part, seconds in parts.items()]
    return f"; adaptree is running there, switched off after errors: {', '.join(since) or 'nothing'}"


_CHECKS: Mapping[str, Callable[[ServiceConfig], str]] = {
    "processor": _processor,
    "torch": _torch,
    "device": _device,
    "state_dir": _state_dir,
    "model": _model,
    "ends": _ends,
    "template": _template,
    "drafter": _drafter,
    "learning": _learning,
    "memory": _memory,
    "port": _port,
}
