"""Every knob of the server, written once: the command line, the environment, the file and the help all derive from it.

The only module that reads the environment. It knows nothing of torch: what depends on the device found at start-up
is computed from values handed in.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from adaptation.config import AdaptationConfig, usable_cores
from service.config_sources import (
    SECTION_SEPARATOR,
    Entry,
    environment_entries,
    explain,
    file_entries,
    flag_name,
    flat_fields,
    nested,
)
from service.errors import StartupError

ENV_PREFIX = "ADAPTREE_"
CONFIG_VARIABLE = "ADAPTREE_CONFIG"
GIB = 1024**3

_CPU_KV_CACHE_GIB = 1.0
_CUDA_KV_CACHE_SHARE = 0.8


def group(name: str) -> dict[str, Any]:
    """Which panel of the help a setting stands in."""
    return {"group": name}


def _split(value: object) -> object:
    """What stands between commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


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


class ServiceConfig(BaseSettings):
    """What an operator may turn. Constructing it reads no file and no environment; `load_config` does."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="Target model: the embedded smollm2-135m, a Hugging Face id, a folder, or a .gguf file.",
        json_schema_extra=group("Model"),
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a Hugging Face id. Unset: its main branch.",
        json_schema_extra=group("Model"),
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto: the model's own weights. dummy: random weights in the shape that model names (llama-3.1-8b, "
        "qwen3-8b, tiny), to measure what steps cost; the text means nothing.",
        json_schema_extra=group("Model"),
    )
    load_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights in memory. auto: bfloat16, for the fastest steps on CPUs and GPUs of today.",
        json_schema_extra=group("Model"),
    )
    device: str = Field(
        default="auto",
        description="Where the target runs: auto (a GPU if there is one), cpu, cuda or cuda:N.",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        json_schema_extra=group("Model"),
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads for tensor work. Unset: one per physical core this process may use.",
        json_schema_extra=group("Model"),
    )
    graphs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Record the forwards of decoding once and replay them. auto: on a GPU, as CUDA graphs. on: also on "
        "a CPU, where it saves nothing. It never changes the text.",
        json_schema_extra=group("Model"),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Longest prompt plus answer, in tokens. Unset: what the model was made for.",
        json_schema_extra=group("Model"),
    )
    kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Memory for keys and values, in GiB. Unset, and no share given: 1 GiB on a CPU.",
        json_schema_extra=group("Memory and batching"),
    )
    kv_cache_share: float | None = Field(
        default=None,
        gt=0,
        le=0.95,
        description="The same as a share of the device memory that is free once the weights are loaded. "
        "Unset, and no GiB given: 0.8 on a GPU.",
        json_schema_extra=group("Memory and batching"),
    )
    max_sequences: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="Most sequences generated at the same time; more of them wait.",
        json_schema_extra=group("Memory and batching"),
    )
    prefill_chunk: int = Field(
        default=256,
        ge=1,
        le=8192,
        description="Most prompt tokens read in one step. Smaller: smoother streams. Larger: prompts are read sooner.",
        json_schema_extra=group("Memory and batching"),
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        description="Most requests that may wait for a place; the next one is answered 429.",
        json_schema_extra=group("Memory and batching"),
    )
    prefix_cache: bool = Field(
        default=True,
        description="Keep the keys and values of texts that have ended, for requests that begin alike. It changes the "
        "time to the first token, never the text.",
        json_schema_extra=group("Memory and batching"),
    )
    isolate_clients: bool = Field(
        default=False,
        description="Let no client find in the prefix cache what another has asked: times to the first token could "
        "tell it.",
        json_schema_extra=group("Memory and batching"),
    )
    speculation: bool = Field(
        default=True,
        description="Draft ahead and verify. It changes the speed of an answer, never its text.",
        json_schema_extra=group("Speculation"),
    )
    drafter: Literal["auto", "lookup+specblock", "specblock", "lookup", "none"] = Field(
        default="auto",
        description="Who drafts. lookup: continuations seen earlier in the same text. specblock: a small network "
        "trained for the target. lookup+specblock: one tree from both. auto: both if there are weights, else lookup.",
        json_schema_extra=group("Speculation"),
    )
    drafter_path: Path | None = Field(
        default=None,
        description="Folder with a trained drafter's config.json and model.safetensors. Unset: the weights that come "
        "with this package, for the embedded model.",
        json_schema_extra=group("Speculation"),
    )
    draft_blocks: int = Field(
        default=1,
        ge=1,
        le=4,
        description="M, blocks of a trained drafter's tree: forward passes of the drafter per step. One pays best "
        "beside the embedded model on a CPU; more where the target is large against the drafter.",
        json_schema_extra=group("Speculation"),
    )
    draft_starts: int = Field(
        default=4,
        ge=1,
        le=16,
        description="Where each block after the first begins: at so many of the likeliest nodes at once.",
        json_schema_extra=group("Speculation"),
    )
    growth: Literal["best_first", "rank", "rank_narrow", "uniform", "beam", "salf"] = Field(
        default="best_first",
        description="Which of a trained drafter's tokens become candidates. best_first: by survival. rank, "
        "rank_narrow: widths by the rank head's class. uniform, beam, salf: for comparison.",
        json_schema_extra=group("Speculation"),
    )
    budget_policy: Literal["cost", "fixed"] = Field(
        default="cost",
        description="How many nodes a step verifies. cost: as many as pay for themselves under the present load. "
        "fixed: always max_budget, for measurements.",
        json_schema_extra=group("Speculation"),
    )
    budget_objective: Literal["throughput", "latency"] = Field(
        default="throughput",
        description="What that budget maximises. throughput: tokens per second, whose ever they are. latency: those of "
        "answers that fall behind budget_pace_seconds count up to four times.",
        json_schema_extra=group("Speculation"),
    )
    budget_pace_seconds: float = Field(
        default=0.05,
        gt=0,
        allow_inf_nan=False,
        description="Seconds per token, from an answer's first token on, that the latency objective tries to keep.",
        json_schema_extra=group("Speculation"),
    )
    max_budget: int = Field(
        default=48,
        ge=0,
        le=64,
        description="Most nodes verified per sequence and step. 0 decodes plainly.",
        json_schema_extra=group("Speculation"),
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. 0.0.0.0 answers the whole network: set api_keys first.",
        json_schema_extra=group("HTTP"),
    )
    port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port to listen on. 0 takes a free one.",
        json_schema_extra=group("HTTP"),
    )
    served_model_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name clients use for the model. Unset: the value of model.",
        json_schema_extra=group("HTTP"),
    )
    max_request_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        description="Largest request body, in bytes; a larger one is answered 413.",
        json_schema_extra=group("HTTP"),
    )
    max_output_tokens: int = Field(
        default=4096,
        ge=1,
        description="Longest answer, in tokens, for requests that ask for more or name no limit.",
        json_schema_extra=group("HTTP"),
    )
    drain_seconds: float = Field(
        default=30,
        ge=0,
        allow_inf_nan=False,
        description="How long running requests may take to finish after SIGTERM.",
        json_schema_extra=group("HTTP"),
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Host names, beside those of this machine, under which requests may come, separated by commas; * "
        "is any. Unset: none where host is a loopback address, so that no web page can reach this server, else any.",
        json_schema_extra=group("Access"),
    )
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        description="Keys clients must send, separated by commas. None: everyone may ask. Prefer the environment or "
        "the file: a flag can be read in the process list.",
        json_schema_extra=group("Access"),
    )
    admin_key: SecretStr | None = Field(
        default=None,
        description="Key of the administration routes. Unset: they are closed.",
        json_schema_extra=group("Access"),
    )
    open_metrics: bool = Field(
        default=True,
        description="Whether /metrics answers without a key.",
        json_schema_extra=group("Access"),
    )
    vllm_metric_names: bool = Field(
        default=False,
        description="Also export what vLLM exports under its vllm: names and labels, which other tools read.",
        json_schema_extra=group("Operation"),
    )
    state_dir: Path = Field(
        default_factory=_default_state_dir,
        description="Folder for converted weights, measured costs and what was learnt while serving. Deleting it costs "
        "nothing else.",
        json_schema_extra=group("Operation"),
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="Least important messages to log.",
        json_schema_extra=group("Operation"),
    )
    log_json: bool = Field(
        default=False,
        description="Log one JSON object per line instead of text.",
        json_schema_extra=group("Operation"),
    )
    adaptation: AdaptationConfig = Field(
        default_factory=AdaptationConfig,
        description="Learning while serving.",
        json_schema_extra=group("Learning while serving"),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # load_config reads the sources itself, to know which one each value came from.
        return (init_settings,)

    @field_validator("kv_cache_share")
    @classmethod
    def _one_memory_setting(cls, share: float | None, info: ValidationInfo) -> float | None:
        gib = info.data.get("kv_cache_gib")
        if share is not None and gib is not None:
            raise ValueError(f"kv_cache_gib is set too, to {gib:g}; keep one of the two")
        return share

    @field_validator("budget_objective")
    @classmethod
    def _objective_with_effect(cls, objective: str, info: ValidationInfo) -> str:
        if objective == "latency" and info.data.get("budget_policy") == "fixed":
            raise ValueError("a fixed budget_policy maximises nothing; set it to cost")
        return objective

    @field_validator("api_keys", "admin_key")
    @classmethod
    def _sendable_keys(
        cls, value: tuple[SecretStr, ...] | SecretStr | None
    ) -> tuple[SecretStr, ...] | SecretStr | None:
        keys = value if isinstance(value, tuple) else (value,) if value else ()
        if not all(key.get_secret_value().isascii() and key.get_secret_value().isprintable() for key in keys):
            raise ValueError("a key must be printable ASCII, or no client can send it in a header")
        if any(not key.get_secret_value() or " " in key.get_secret_value() for key in keys):
            raise ValueError("a key must not be empty or contain spaces")
        return value

    @field_validator("state_dir")
    @classmethod
    def _home_expanded(cls, path: Path) -> Path:
        return path.expanduser()

    @property
    def public_model_name(self) -> str:
        """What clients put into `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        is_path = self.model.endswith(".gguf") or self.model.startswith(("/", "./", "../", "~"))
        return Path(self.model).name.removesuffix(".gguf") if is_path else self.model

    @property
    def checked_hosts(self) -> frozenset[str] | None:
        """The host names that are taken beside those of this machine; None: any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or is_loopback(self.host)):
            return None
        return frozenset(name.lower() for name in self.allowed_hosts)

    @property
    def num_threads(self) -> int:
        """CPU threads for tensor work; fixed for the whole run, because sums depend on how they are split."""
        return usable_cores() if self.threads is None else self.threads

    def kv_cache_bytes(self, device_type: str, free_bytes: int) -> int:
        """Memory for keys and values on a device of this type with so much free memory."""
        if self.kv_cache_gib is not None:
            return int(self.kv_cache_gib * GIB)
        if self.kv_cache_share is not None:
            return int(self.kv_cache_share * free_bytes)
        return int(_CPU_KV_CACHE_GIB * GIB) if device_type == "cpu" else int(_CUDA_KV_CACHE_SHARE * free_bytes)


SETTINGS: Mapping[str, FieldInfo] = flat_fields(ServiceConfig)
"""Every setting by its flat name; those of a section as `section.name`."""


def panel_of(name: str) -> str:
    """The panel of the help in which a setting stands; a section has one of its own."""
    extra = ServiceConfig.model_fields[name.partition(SECTION_SEPARATOR)[0]].json_schema_extra
    assert isinstance(extra, dict), f"{name} has no group"
    return str(extra["group"])


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The values in force, and for each, by its flat name, the words that say where it was set."""

    config: ServiceConfig
    origin: Mapping[str, str]


def load_config(flags: Mapping[str, object], environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Defaults, then the file, then the environment, then the flags: each overrides the one before.

    `flags` holds the ones that were given, by name in `SETTINGS`, and `config` for the path of the file.
    """
    variables = dict(os.environ if environ is None else environ)
    named = variables.pop(CONFIG_VARIABLE, None)
    file = flags.get("config") or named
    layers = [
        _file_layer(Path(str(file)).expanduser()) if file else [],
        environment_entries(variables, ServiceConfig, prefix=ENV_PREFIX),
        [(name, value, f"flag {flag_name(name)}") for name, value in flags.items() if name != "config"],
    ]
    values: dict[str, object] = {}
    origin = dict.fromkeys(SETTINGS, "default")
    for name, value, source in (entry for layer in layers for entry in layer):
        values[name], origin[name] = value, source
    try:
        return LoadedConfig(ServiceConfig.model_validate(nested(values)), origin)
    except ValidationError as error:
        raise StartupError(explain(error, SETTINGS, values, origin)) from None


def _file_layer(path: Path) -> list[Entry]:
    return file_entries(path, ServiceConfig, hint=f"--config and {CONFIG_VARIABLE}")
