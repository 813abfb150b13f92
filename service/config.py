"""Every setting of the server, written once: command line, environment, file and help derive from it."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from adaptation.config import AdaptationConfig, usable_cores
from service.api_keys import ApiKey, KeyHash, distinct

GIB = 1024**3

_WAITING_PER_SEQUENCE = 8
_ORIGIN = re.compile(r"https?://[^/?#@\s*]+")
_RELEASE = re.compile(r"per_step|(paced|constant_rate)\((\d*\.?\d+(?:e-?\d+)?)\)")
_SLOWEST_RELEASE = 10.0  # seconds per token
_KIND = r"[\w.-]+(?:\([^()+]*\))?"
_DRAFTER = re.compile(rf"{_KIND}(?:\+{_KIND})?|switch\({_KIND},{_KIND}\)")
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(GiB|MiB|%)\s*", re.IGNORECASE)
_CPU_MEMORY, _CUDA_MEMORY = "1GiB", "80%"
_PAST_MEMORY = "64MiB"  # three million tokens
_LARGEST_SHARE = 95  # percent; steps need what is left


def _setting(default: Any, description: str, *, panel: str | None = None, **limits: Any) -> Any:
    """A setting; with `panel` it is the first one in that panel of the help."""
    limits["default_factory" if callable(default) else "default"] = default
    return Field(title=panel, description=description, **limits)


def _split(value: object) -> object:
    """What stands between commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _memory(value: str | None) -> str | None:
    match = None if value is None else _MEMORY.fullmatch(value)
    if value is not None and (match is None or float(match[1]) == 0):
        raise ValueError("say how much, as in 4GiB, 512MiB or 80%")
    if match is not None and match[2] == "%" and float(match[1]) > _LARGEST_SHARE:
        raise ValueError(f"at most {_LARGEST_SHARE}%, for steps need memory too")
    return value


def _past(value: str) -> str:
    if value not in ("auto", "off") and (_MEMORY.fullmatch(value) is None or "%" in value):
        raise ValueError("say auto, off or how much, as in 256MiB")
    return value


def _model(value: str) -> str:
    for form, command in (("widen(", "widened --copies 2"), ("dummy(", "dummy --shape llama-3.1-8b")):
        if value.startswith(form):
            raise ValueError(
                f"write such a model with `python -m benchmarks checkpoint {command} --out FOLDER` from a checkout, "
                "and set model to FOLDER"
            )
    return value


def _release(value: str) -> str:
    match = _RELEASE.fullmatch(value)
    if match is None or (match[2] is not None and not 0 < float(match[2]) <= _SLOWEST_RELEASE):
        most = f"at most {_SLOWEST_RELEASE:g} seconds per token"
        raise ValueError(f"say per_step, paced(SECONDS) or constant_rate(SECONDS), {most}, as in paced(0.05)")
    return value


def _drafter(value: str) -> str:
    if not _DRAFTER.fullmatch(value):
        raise ValueError("name one drafter, as in memory or early_exit(4), or two as memory+A or switch(A,B)")
    return value


def _origins(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _ORIGIN.fullmatch(value):
            raise ValueError(
                f"{value!r} is no origin: name each exactly, as in https://chat.example or http://localhost:3000"
            )
    return values


def _word_for_switch(value: object) -> object:
    """YAML reads `off` as false."""
    return {False: "off", True: "shared"}[value] if isinstance(value, bool) else value


def _off(value: object) -> object:
    return "off" if value is False else value


def is_loopback(host: str) -> bool:
    """Whether this name or address is this machine, whoever asks."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _default_state_dir() -> Path:
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "adaptree"


class ServiceConfig(BaseModel):
    """What an operator may turn. Constructing it reads no file and no environment; `load_config` does."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model: Annotated[str, AfterValidator(_model)] = _setting(
        "smollm2-135m",
        "Target model: the embedded smollm2-135m, a Hugging Face id (id@revision for a branch, tag or commit), a "
        "folder, or a .gguf file.",
        panel="Model",
        min_length=1,
    )
    load_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _setting(
        "auto",
        "Type of the weights in memory. auto: on a CPU a GGUF file stays as it is, in blocks of 4 to 8 bits, anything "
        "else is bfloat16. int8: on a CPU linear layers in 8 bits with a scale for each 32 columns, as GGUF's Q8_0.",
    )
    device: str = _setting(
        "auto",
        "Where the target runs: auto (a GPU if there is one), cpu, cuda or cuda:N.",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    threads: int | None = _setting(
        None, "CPU threads for tensor work. Unset: one per physical core this process may use.", ge=1, le=1024
    )
    max_model_len: int | None = _setting(
        None, "Longest prompt plus answer, in tokens. Unset: what the model was made for.", ge=16
    )
    kv_cache: Annotated[str | None, AfterValidator(_memory)] = _setting(
        None,
        "Memory for keys and values: a size (4GiB, 512MiB), or a share of the device memory that is free once the "
        "weights are loaded (80%). Unset: 1GiB on a CPU, 80% on a GPU.",
        panel="Memory and batching",
    )
    max_sequences: int = _setting(
        32,
        "Most sequences generated at the same time; 8 times as many may wait, and the next one is answered 429.",
        ge=1,
        le=1024,
    )
    prefill_chunk: int = _setting(
        256,
        "Most prompt tokens read in one step. Smaller: smoother streams. Larger: prompts are read sooner.",
        ge=1,
        le=8192,
    )
    prefix_cache: Annotated[Literal["shared", "per_client", "off"], BeforeValidator(_word_for_switch)] = _setting(
        "shared",
        "Keep the keys and values of texts that have ended, for requests that begin alike; it changes the time to the "
        "first token, never the text. That time could tell what others have asked, so no API key finds what came with "
        "another. shared: the users of a key share. per_client: each user finds only its own.",
    )
    drafter: Annotated[str, AfterValidator(_drafter)] = _setting(
        "auto",
        "Who drafts. memory: what followed earlier in the text and in past answers. specblock: a small trained "
        "network. draft_model: the model in drafter_path. early_exit(N): N layers of the target. mtp: the target's own "
        "module. memory+A: one tree of both. switch(A,B): one in each step. auto: memory, and what is trained. none: "
        "no drafts.",
        panel="Speculation",
    )
    drafter_path: Path | None = _setting(
        None,
        "Folder with a trained drafter's config.json and model.safetensors; for draft_model the model, as in `model`. "
        "Unset: what `adaptree drafter import` put into state_dir for the model, else the weights that come with this "
        "package, for the embedded model, or with the model.",
    )
    memory: Annotated[str, BeforeValidator(_off), AfterValidator(_past)] = _setting(
        "auto",
        "Past answers that drafts copy from, at no cost: a size (256MiB; some 20 bytes a token), auto (64MiB) or "
        "off. It changes the speed of answers, never their text. API keys do not share: each has an equal part.",
    )
    memory_file: Path | None = _setting(
        None,
        "File that keeps past answers over restarts, for the server's user alone to read; its key lies beside it, "
        "FILE.key. Unset: a restart forgets them.",
    )
    draft_blocks: int = _setting(
        1,
        "M, blocks of a trained drafter's tree: forward passes of the drafter per step. One pays best beside the "
        "embedded model on a CPU; more where the target is large against the drafter.",
        ge=1,
        le=4,
    )
    budget_policy: Literal["cost", "fixed"] = _setting(
        "cost",
        "How many nodes a step verifies. cost: as many as pay for themselves under the present load. fixed: always "
        "max_budget, for measurements.",
    )
    stream_release: Annotated[str, AfterValidator(_release)] = _setting(
        "per_step",
        "How tokens leave. per_step: as steps bring them. paced(SECONDS): so, too, and a budget by cost tries to keep "
        "so many seconds per token; late ones count up to four times. constant_rate(SECONDS): besides, one at a "
        "time at this rate, in events of one size, which tell nobody what speculation did.",
    )
    max_budget: int = _setting(48, "Most nodes verified per sequence and step. 0 decodes plainly.", ge=0, le=256)
    host: str = _setting(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0 answers the whole network: set api_keys first.",
        panel="HTTP",
        min_length=1,
    )
    port: int = _setting(8000, "Port to listen on. 0 takes a free one.", ge=0, le=65535)
    served_model_name: str | None = _setting(
        None, "Name clients use for the model. Unset: the value of model.", min_length=1
    )
    max_output_tokens: int | None = _setting(
        None,
        "Longest answer, in tokens, for requests that ask for more or name no limit. Unset: as the context allows.",
        ge=1,
    )
    drain_seconds: float = _setting(
        30, "How long running requests may take to finish after SIGTERM.", ge=0, allow_inf_nan=False
    )
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = _setting(
        (),
        "Host names, beside those of this machine, under which requests may come, separated by commas; * is any. "
        "Unset: none where host is a loopback address, so that no web page can reach this server, else any.",
        panel="Access",
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_origins)] = _setting(
        (),
        "Origins of web pages whose scripts may ask this server, such as https://chat.example, separated by commas. "
        "Unset: none.",
        panel="Access",
    )
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(_split), AfterValidator(distinct)] = _setting(
        (),
        "Keys clients must send, plain or as sha256:HEX, separated by commas. None: everyone may ask. In the file an "
        "entry may hold limits: key, name, requests_per_minute, tokens_per_minute, max_concurrent, budget_tokens (a "
        "month). A flag can be read in the process list.",
    )
    admin_key: KeyHash | None = _setting(
        None, "Key of the administration routes, plain or as sha256:HEX. Unset: they are closed."
    )
    open_metrics: bool = _setting(True, "Whether /metrics answers without a key.")
    state_dir: Path = _setting(
        _default_state_dir,
        "Folder for converted weights, measured costs, imported drafters and what was learnt while serving. Deleting "
        "it costs nothing else.",
        panel="Operation",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Least important messages to log.")
    log_json: bool = _setting(False, "Log one JSON object per line instead of text.")
    adaptation: AdaptationConfig = _setting(AdaptationConfig, "Learning while serving.", panel="Learning while serving")

    @field_validator("stream_release")
    @classmethod
    def _pace_with_effect(cls, release: str, info: ValidationInfo) -> str:
        if release.startswith("paced") and info.data.get("budget_policy") == "fixed":
            raise ValueError("a fixed budget_policy keeps no pace; set it to cost")
        return release

    @field_validator("state_dir", "memory_file")
    @classmethod
    def _home_expanded(cls, path: Path | None) -> Path | None:
        return path and path.expanduser()

    @property
    def model_source(self) -> str:
        """The model without its revision."""
        return self.model if self._is_path else self.model.partition("@")[0]

    @property
    def pace_seconds(self) -> float | None:
        """Seconds per token that a budget by cost tries to keep."""
        match = _RELEASE.fullmatch(self.stream_release)
        return None if match is None or match[2] is None else float(match[2])

    @property
    def release_seconds(self) -> float | None:
        """Seconds between two tokens that leave, where they leave at a constant rate."""
        return self.pace_seconds if self.stream_release.startswith("constant_rate") else None

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a Hugging Face id; None: its main branch."""
        return None if self._is_path else self.model.partition("@")[2] or None

    @property
    def _is_path(self) -> bool:
        return self.model.endswith(".gguf") or self.model.startswith(("/", "./", "../", "~"))

    @property
    def public_model_name(self) -> str:
        """What clients put into `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        return Path(self.model).name.removesuffix(".gguf") if self._is_path else self.model_source

    @property
    def checked_hosts(self) -> frozenset[str] | None:
        """The host names that are taken beside those of this machine; None: any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return None
        return frozenset(name.lower() for name in self.allowed_hosts)

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait for a place."""
        return _WAITING_PER_SEQUENCE * self.max_sequences

    @property
    def num_threads(self) -> int:
        """CPU threads for tensor work; fixed for the whole run, because sums depend on how they are split."""
        return usable_cores() if self.threads is None else self.threads

    @property
    def memory_bytes(self) -> int:
        """Memory for past answers; 0: none are remembered."""
        match = _MEMORY.fullmatch({"auto": _PAST_MEMORY, "off": "0MiB"}.get(self.memory, self.memory))
        assert match is not None, "checked when it was set"
        return int(float(match[1]) * {"gib": GIB, "mib": 1024**2}[match[2].lower()])

    def kv_cache_bytes(self, device_type: str, free_bytes: int) -> int:
        """Memory for keys and values on a device of this type with so much free memory."""
        match = _MEMORY.fullmatch(self.kv_cache or (_CPU_MEMORY if device_type == "cpu" else _CUDA_MEMORY))
        assert match is not None, "checked when it was set"
        unit = {"gib": GIB, "mib": 1024**2, "%": free_bytes / 100}[match[2].lower()]
        return int(float(match[1]) * unit)


SETTINGS: Mapping[str, FieldInfo] = {
    **{name: field for name, field in ServiceConfig.model_fields.items() if name != "adaptation"},
    **{f"adaptation.{name}": field for name, field in AdaptationConfig.model_fields.items()},
}
"""Every setting by its flat name; those of the section `adaptation` as `adaptation.name`."""


def panel_of(name: str) -> str:
    """The panel of the help in which a setting stands; a section has one of its own."""
    names = list(ServiceConfig.model_fields)
    before = names[: names.index(name.partition(".")[0]) + 1]
    return next(title for name in reversed(before) if (title := ServiceConfig.model_fields[name].title))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The values in force, and for each, by its flat name, the words that say where it was set."""

    config: ServiceConfig
    origin: Mapping[str, str]
