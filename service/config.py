"""All settings of the server, declared once: command line, environment, file and help are derived from them."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryFile
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
from service.errors import StartupError

GIB = 1024**3

_WAITING_PER_SEQUENCE = 8
_ORIGIN = re.compile(r"https?://[^/?#@\s*]+")
_RELEASE = re.compile(r"per_step|(paced|constant_rate)\((\d*\.?\d+(?:e-?\d+)?)\)")
_SLOWEST_RELEASE = 10.0  # seconds per token
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(GiB|MiB|%)\s*", re.IGNORECASE)
_CUDA_MEMORY = "80%"
_PAST_MEMORY = "64MiB"  # three million tokens
_LARGEST_SHARE = 95  # percent; steps need the rest


def _setting(default: Any, description: str, *, panel: str | None = None, **limits: Any) -> Any:
    """Declare a setting; `panel`: title of the help panel that begins with it."""
    limits["default_factory" if callable(default) else "default"] = default
    return Field(title=panel, description=description, **limits)


def _split(value: object) -> object:
    """Split a comma-separated list."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _memory(value: str | None) -> str | None:
    match = None if value is None else _MEMORY.fullmatch(value)
    if value is not None and (match is None or float(match[1]) == 0):
        raise ValueError("give a size or a share, as in 4GiB, 512MiB or 80%")
    if match is not None and match[2] == "%" and float(match[1]) > _LARGEST_SHARE:
        raise ValueError(f"at most {_LARGEST_SHARE}%, because steps need memory too")
    return value


def _past(value: str) -> str:
    if value not in ("auto", "off") and (_MEMORY.fullmatch(value) is None or "%" in value):
        raise ValueError("set auto, off or a size, as in 256MiB")
    return value


def _release(value: str) -> str:
    match = _RELEASE.fullmatch(value)
    if match is None or (match[2] is not None and not 0 < float(match[2]) <= _SLOWEST_RELEASE):
        most = f"at most {_SLOWEST_RELEASE:g} seconds per token"
        raise ValueError(f"set per_step, paced(SECONDS) or constant_rate(SECONDS), {most}, as in paced(0.05)")
    return value


def _origins(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _ORIGIN.fullmatch(value):
            raise ValueError(
                f"{value!r} is not an origin: give each exactly, as in https://chat.example or http://localhost:3000"
            )
    return values


def _word_for_switch(value: object, on: str = "shared") -> object:
    """Map booleans to words, because YAML reads `on` and `off` as booleans."""
    return {False: "off", True: on}[value] if isinstance(value, bool) else value


def is_loopback(host: str) -> bool:
    """Whether a host name or address always means this machine."""
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
    """All settings of the server. `load_config` reads them from file, environment and flags."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str = _setting(
        "smollm2-135m",
        "Target model: the embedded smollm2-135m, a Hugging Face id (id@revision for a branch, tag or commit), a "
        "folder, or a .gguf file.",
        panel="Model",
        min_length=1,
    )
    load_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _setting(
        "auto",
        "Type of the weights in memory. auto: on a CPU a GGUF file stays in its blocks of 4 to 8 bits, with "
        "float32 between them; everything else is bfloat16. int8: on a CPU, linear layers in 8 bits with a scale per "
        "32 columns, as GGUF's Q8_0.",
    )
    unverified: bool = _setting(
        False, "Also serve model families whose logits no test compares with the logits of other engines."
    )
    device: str = _setting(
        "auto",
        "Where the target runs: auto (a GPU if there is one), cpu, cuda or cuda:N.",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    tensor_parallel: int = _setting(
        1,
        "Number of processes that share the model, each on a device of its own with its part of weights and KV cache: "
        "1, 2, 4 or 8. On CPUs it changes no text. On one machine the server starts them, across machines torchrun.",
        ge=1,
        le=8,
    )
    threads: int | None = _setting(
        None,
        "CPU threads for tensor work, of each process that shares the model. Unset: one per physical core this process "
        "may use, within its CPU quota, divided by tensor_parallel.",
        ge=1,
        le=1024,
    )
    max_model_len: int | None = _setting(
        None, "Maximum length of prompt plus answer, in tokens. Unset: the model's own.", ge=16
    )
    kv_cache: Annotated[str | None, AfterValidator(_memory)] = _setting(
        None,
        "Memory for the KV cache: a size (4GiB, 512MiB), or a share of the device memory that is free once the "
        "weights are loaded (80%). Unset: 80% on a GPU; on a CPU 1GiB, beside the states of recurrent layers.",
        panel="Memory and batching",
    )
    max_sequences: int = _setting(
        32,
        "Maximum number of requests generated at the same time; 8 times as many may wait, more get status 429.",
        ge=1,
        le=1024,
    )
    prefill_chunk: int = _setting(
        256,
        "Maximum number of prompt tokens per step. Smaller: smoother streams. Larger: prompts are read sooner.",
        ge=1,
        le=8192,
    )
    async_scheduling: Annotated[Literal["auto", "on", "off"], BeforeValidator(partial(_word_for_switch, on="on"))] = (
        _setting(
            "auto",
            "Launch each step before the tokens of the one before are read, so that the device need not wait for the "
            "host; it changes no text. auto: on a GPU.",
        )
    )
    prefix_cache: Annotated[Literal["shared", "per_client", "off"], BeforeValidator(_word_for_switch)] = _setting(
        "shared",
        "Keep the KV cache of finished requests for others with the same beginning; it changes the time to the first "
        "token, never the text. As that time could reveal what others have sent, API keys never share. shared: "
        "the users of a key share. per_client: each user has a cache of its own.",
    )
    drafter: str = _setting(
        "auto",
        "The drafter. memory: copies from the text and from past answers. specblock: a small trained network. "
        "draft_model: the model in drafter_path. mtp: the target's own module. memory+A: one tree of both. "
        "auto: memory, with a trained drafter if there is one. none: no drafts.",
        panel="Speculation",
    )
    drafter_path: Path | None = _setting(
        None,
        "Folder with a trained drafter's config.json and weights, in our form or as others publish it, or its Hugging "
        "Face id (id@revision); for draft_model the model, as in `model`. Unset: the drafter that was imported for "
        "the model with release 0.3.0, else the one shipped with this package or with the model, else one that is "
        "known to be published for it.",
    )
    memory: Annotated[str, BeforeValidator(_word_for_switch), AfterValidator(_past)] = _setting(
        "auto",
        "Memory for past answers, from which drafts copy: a size (256MiB; some 20 bytes per token), auto (64MiB) or "
        "off. It changes the speed of answers, never their text. Each API key has an equal share.",
    )
    memory_file: Path | None = _setting(
        None,
        "File that keeps past answers over restarts, readable by the server's user only; its key is in FILE.key. "
        "Unset: a restart forgets them.",
    )
    draft_blocks: int = _setting(
        1,
        "M, blocks of a trained drafter's tree: forward passes of the drafter per step. One is best for the embedded "
        "model on a CPU; more pay if the target is much larger than the drafter.",
        ge=1,
        le=4,
    )
    budget_policy: Literal["cost", "fixed"] = _setting(
        "cost",
        "How many draft tokens a step verifies. cost: as many as pay off under the current load. fixed: max_budget, "
        "for measurements.",
    )
    stream_release: Annotated[str, AfterValidator(_release)] = _setting(
        "per_step",
        "When tokens are sent. per_step: as steps produce them. paced(SECONDS): the same, and the cost budget aims at "
        "SECONDS per token; late tokens count up to four times. constant_rate(SECONDS): the same aim, and tokens are "
        "sent one at a time at this rate, in events of one size, which hide what speculation did.",
    )
    max_budget: int = _setting(
        48, "Maximum number of draft tokens verified per request and step. 0: plain decoding.", ge=0, le=256
    )
    host: str = _setting(
        "127.0.0.1",
        "Address to listen on. 0.0.0.0 serves the whole network: set api_keys first.",
        panel="HTTP",
        min_length=1,
    )
    port: int = _setting(8000, "Port to listen on. 0 takes a free one.", ge=0, le=65535)
    served_model_name: str | None = _setting(
        None, "Name by which clients call the model. Unset: the value of model.", min_length=1
    )
    max_output_tokens: int | None = _setting(
        None,
        "Maximum answer length in tokens, for requests with a higher limit or none. Unset: as the context allows.",
        ge=1,
    )
    raw_prompts: Literal["special", "text"] = _setting(
        "special",
        "The name of a control token, such as <|im_end|>, in a prompt of /v1/completions. special: it is that token, "
        "for the prompt is the client's own. text: it is text, for applications that put users' words into prompts.",
    )
    drain_seconds: float = _setting(
        30, "Seconds that running requests have to finish after SIGTERM or Ctrl-C.", ge=0, allow_inf_nan=False
    )
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_split)] = _setting(
        (),
        "Host names of requests that are accepted besides localhost and loopback addresses, separated by commas; * is "
        "any. Unset: none if host is a loopback address, so that no web page can reach this server, else any.",
        panel="Access",
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_split), AfterValidator(_origins)] = _setting(
        (),
        "Origins of web pages whose scripts may use this server, such as https://chat.example, separated by commas. "
        "Unset: none.",
        panel="Access",
    )
    api_keys: Annotated[tuple[ApiKey, ...], BeforeValidator(_split), AfterValidator(distinct)] = _setting(
        (),
        "Keys of clients, plain or as sha256:HEX, separated by commas. None: no key is needed. In the file an entry "
        "may hold limits: key, name, requests_per_minute, tokens_per_minute, max_concurrent, budget_tokens (a month). "
        "Flags are visible in the process list.",
    )
    admin_key: KeyHash | None = _setting(
        None, "Key of the operator, who may pause learning and roll it back, plain or as sha256:HEX. Unset: no one may."
    )
    open_metrics: bool = _setting(True, "Serve /metrics and the live feed without a key.")
    state_dir: Path = _setting(
        _default_state_dir,
        "Folder for measured costs and what was learnt while serving. Deleting it loses only these.",
        panel="Operation",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Minimum level of messages to log.")
    log_json: bool = _setting(False, "Log one JSON object per line instead of text.")
    adaptation: AdaptationConfig = _setting(AdaptationConfig, "Learning while serving.", panel="Learning while serving")

    @field_validator("stream_release")
    @classmethod
    def _pace_with_effect(cls, release: str, info: ValidationInfo) -> str:
        if release.startswith("paced") and info.data.get("budget_policy") == "fixed":
            raise ValueError("budget_policy fixed cannot keep a pace; set it to cost")
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
        """Seconds per token that the cost budget aims at, or None without a pace."""
        match = _RELEASE.fullmatch(self.stream_release)
        return None if match is None or match[2] is None else float(match[2])

    @property
    def release_seconds(self) -> float | None:
        """Seconds between two tokens sent at a constant rate, or None if tokens are sent as steps produce them."""
        return self.pace_seconds if self.stream_release.startswith("constant_rate") else None

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a Hugging Face id, or None for the main branch."""
        return None if self._is_path else self.model.partition("@")[2] or None

    @property
    def _is_path(self) -> bool:
        return self.model.endswith(".gguf") or self.model.startswith(("/", "./", "../", "~"))

    @property
    def public_model_name(self) -> str:
        """Name of the model for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        return Path(self.model).name.removesuffix(".gguf") if self._is_path else self.model_source

    @property
    def checked_hosts(self) -> frozenset[str] | None:
        """Host names accepted besides localhost and loopback addresses, or None for any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return None
        return frozenset(name.lower() for name in self.allowed_hosts)

    @property
    def max_waiting(self) -> int:
        """Maximum length of the waiting queue, in requests."""
        return _WAITING_PER_SEQUENCE * self.max_sequences

    @property
    def num_threads(self) -> int:
        """CPU threads for tensor work. Fixed for the whole run, because torch without compiled kernels splits sums by
        thread, which changes their rounding."""
        return max(1, usable_cores() // self.tensor_parallel) if self.threads is None else self.threads

    @property
    def memory_bytes(self) -> int:
        """Bytes for past answers; 0 if none are kept."""
        match = _MEMORY.fullmatch({"auto": _PAST_MEMORY, "off": "0MiB"}.get(self.memory, self.memory))
        assert match is not None, "checked when it was set"
        return int(float(match[1]) * {"gib": GIB, "mib": 1024**2}[match[2].lower()])

    def kv_cache_bytes(self, device_type: str, free_bytes: int, *, states_bytes: int = 0) -> int:
        """Return the bytes for the KV cache on a device of this type with `free_bytes` of free memory. `states_bytes`:
        states of running sequences, which the default of a CPU does not count."""
        if self.kv_cache is None and device_type == "cpu":
            return GIB + states_bytes
        match = _MEMORY.fullmatch(self.kv_cache or _CUDA_MEMORY)
        assert match is not None, "checked when it was set"
        unit = {"gib": GIB, "mib": 1024**2, "%": free_bytes / 100}[match[2].lower()]
        return int(float(match[1]) * unit)


def check_writable(state_dir: Path) -> None:
    """Create the folder if it is missing. Raises StartupError if it cannot be written."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=state_dir):
            pass
    except OSError as error:
        raise StartupError(
            f"state_dir {state_dir} cannot be written: {error.strerror}; make it a folder that this user may write "
            "to, or name another with --state-dir"
        ) from error


SETTINGS: Mapping[str, FieldInfo] = {
    **{name: field for name, field in ServiceConfig.model_fields.items() if name != "adaptation"},
    **{f"adaptation.{name}": field for name, field in AdaptationConfig.model_fields.items()},
}
"""All settings by flat name; settings of the section `adaptation` as `adaptation.name`."""


def panel_of(name: str) -> str:
    """Return the title of the help panel that lists a setting."""
    names = list(ServiceConfig.model_fields)
    before = names[: names.index(name.partition(".")[0]) + 1]
    return next(title for name in reversed(before) if (title := ServiceConfig.model_fields[name].title))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Settings in force, and by flat name a description of where each was set."""

    config: ServiceConfig
    origin: Mapping[str, str]
