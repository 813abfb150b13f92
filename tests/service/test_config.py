"""Where settings come from, which source wins, and how an impossible one is refused."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from adaptation.config import AdaptationConfig
from service.api.responses_schemas import ResponsesRequest
from service.api.schemas import ChatCompletionRequest, CompletionRequest
from service.api_keys import digest_in, digest_of
from service.config import GIB, SETTINGS, LoadedConfig, ServiceConfig
from service.config_sources import flat_values, load_config
from service.errors import StartupError
from service.sampling_params import SamplingFields, SamplingParams
from tests.architecture.rules import ROOT


def written(folder: Path, text: str) -> Path:
    path = folder / "adaptree.yaml"
    path.write_text(text)
    return path


def refusal(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        load_config(flags or {}, environ or {})
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    loaded = load_config({}, {})
    assert loaded == LoadedConfig(ServiceConfig(), dict.fromkeys(SETTINGS, "default"))
    assert (loaded.config.model, loaded.config.port, loaded.config.max_budget) == ("smollm2-135m", 8000, 48)


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1\nmax_budget: 1\nmax_sequences: 1\n")
    environ = {"ADAPTREE_CONFIG": str(file), "ADAPTREE_PORT": "2", "ADAPTREE_MAX_BUDGET": "2"}
    loaded = load_config({"port": "3"}, environ)
    assert (loaded.config.port, loaded.config.max_budget, loaded.config.max_sequences) == (3, 2, 1)
    assert loaded.origin["port"] == "flag --port"
    assert loaded.origin["max_budget"] == "environment ADAPTREE_MAX_BUDGET"
    assert loaded.origin["max_sequences"] == f"file {file}"
    assert loaded.origin["host"] == "default"


def test_constructing_it_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTREE_PORT", "9")
    assert ServiceConfig().port == 8000
    assert load_config({}).config.port == 9
    assert load_config({}, {}).config.port == 8000


def test_an_empty_variable_counts_as_unset() -> None:
    loaded = load_config({}, {"ADAPTREE_ADMIN_KEY": "", "ADAPTREE_API_KEYS": ""})
    assert loaded.config.admin_key is None
    assert loaded.origin["api_keys"] == "default"


@pytest.mark.parametrize("text", ["true", "1", "yes", "on"])
def test_switches_understand_the_usual_words(text: str) -> None:
    assert load_config({}, {"ADAPTREE_LOG_JSON": text}).config.log_json is True


def test_keys_come_as_text_or_as_a_list(tmp_path: Path) -> None:
    from_environment = load_config({}, {"ADAPTREE_API_KEYS": "one, two,"}).config
    from_file = load_config({"config": written(tmp_path, "api_keys: [one, two]\n")}, {}).config
    assert [digest_in(entry.key) for entry in from_environment.api_keys] == [digest_of(b"one"), digest_of(b"two")]
    assert from_environment == from_file


@pytest.mark.parametrize(
    ("settings", "checked"),
    [
        ({}, frozenset()),
        ({"host": "::1"}, frozenset()),
        ({"host": "0.0.0.0"}, None),
        ({"host": "llm.example"}, None),
        ({"allowed_hosts": "*"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": "a.example, B.example"}, frozenset({"a.example", "b.example"})),
    ],
)
def test_a_server_for_this_machine_alone_knows_its_names(settings: dict[str, str], checked: object) -> None:
    assert load_config(dict(settings), {}).config.checked_hosts == checked


@pytest.mark.parametrize(
    ("text", "variable", "words"),
    [
        ("max_sequence: 8\n", None, "sets max_sequence, which is not a setting; did you mean max_sequences?"),
        (
            "adaptation:\n  alhpa: 1\n",
            None,
            "sets adaptation.alhpa, which is not a setting; did you mean adaptation.alpha?",
        ),
        ("", "PROT", "the environment sets ADAPTREE_PROT, which is not a setting; did you mean ADAPTREE_PORT?"),
        ("", "ADAPTATION__ALHPA", "which is not a setting; did you mean ADAPTREE_ADAPTATION__ALPHA?"),
        ("", "ADAPTATION", "ADAPTREE_ADAPTATION, which is not a setting"),
        ("", "XQZ", "`adaptree config show` lists"),
        ("adaptation: true\n", None, "it is a section: put `setting: value` lines below it"),
        ("adaptation: [alpha]\n", None, "it is a section: put `setting: value` lines below it"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    tmp_path: Path, text: str, variable: str | None, words: str
) -> None:
    environ = {} if variable is None else {f"ADAPTREE_{variable}": "1"}
    assert words in refusal({"config": written(tmp_path, text)}, environ)


def test_variables_of_others_are_left_alone() -> None:
    assert load_config({}, {"PORT": "1", "OTHER_PORT": "2"}).config.port == 8000


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path / "absent.yaml") in refusal({"config": tmp_path / "absent.yaml"})


@pytest.mark.parametrize("text", ["port: [", "- port\n- host\n", "just words\n", "port: 1\n\tx: 2\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    assert str(file) in refusal({"config": file})


def test_an_impossible_value_says_field_value_source_and_fix(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 70000\n")
    assert refusal({"config": file}) == (
        f"port = 70000, from file {file}, is invalid: input should be less than or equal to 65535. "
        f"Fix: change `port` in {file}; it takes at least 0 and at most 65535."
    )
    assert refusal(environ={"ADAPTREE_LOAD_DTYPE": "int4"}) == (
        "load_dtype = 'int4', from environment ADAPTREE_LOAD_DTYPE, is invalid: input should be 'auto', 'float32', "
        "'bfloat16', 'float16' or 'int8'. "
        "Fix: change or drop ADAPTREE_LOAD_DTYPE; it takes one of auto, float32, bfloat16, float16, int8."
    )


def test_all_impossible_values_are_reported_at_once() -> None:
    lines = refusal({"port": "x", "max_budget": "257"}, {"ADAPTREE_DEVICE": "magic!"}).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["device", "max_budget", "port"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("threads", "0"),
        ("max_model_len", "1"),
        ("kv_cache", "0GiB"),
        ("kv_cache", "4"),
        ("kv_cache", "-4GiB"),
        ("kv_cache", "100%"),
        ("prefix_cache", "true"),
        ("max_sequences", "0"),
        ("prefill_chunk", "0"),
        ("budget_policy", "free"),
        ("stream_release", "constant_rate"),
        ("stream_release", "paced(0)"),
        ("stream_release", "constant_rate(inf)"),
        ("stream_release", "constant_rate(11)"),
        ("max_budget", "257"),
        ("port", "65536"),
        ("max_output_tokens", "0"),
        ("drain_seconds", "-1"),
        ("drain_seconds", "inf"),
        ("admin_key", "a b"),
        ("api_keys", "ä"),
        ("log_level", "loud"),
    ],
)
def test_impossible_values_stop_the_start(name: str, value: str) -> None:
    assert f"change or drop --{name.replace('_', '-')}" in refusal({name: value})


@pytest.mark.parametrize("name", ["auto", "specblock", "memory+specblock", "my-own.kind"])
def test_names_of_drafters_may_be_of_kinds_that_are_installed(name: str) -> None:
    assert load_config({"drafter": name}, {}).config.drafter == name


def test_a_pace_needs_a_budget_that_can_keep_it() -> None:
    message = refusal({"stream_release": "paced(0.05)", "budget_policy": "fixed"})
    assert "budget_policy fixed cannot keep a pace; set it to cost" in message


@pytest.mark.parametrize(
    ("release", "pace", "rate"),
    [("per_step", None, None), ("paced(0.05)", 0.05, None), ("constant_rate(2e-2)", 0.02, 0.02)],
)
def test_how_tokens_leave(release: str, pace: float | None, rate: float | None) -> None:
    config = load_config({"stream_release": release}, {}).config
    assert (config.pace_seconds, config.release_seconds) == (pace, rate)


@pytest.mark.parametrize(("text", "found"), [("off", "off"), ("per_client", "per_client"), ("on", "shared")])
def test_words_that_yaml_reads_as_switches(tmp_path: Path, text: str, found: str) -> None:
    assert load_config({"config": written(tmp_path, f"prefix_cache: {text}\n")}, {}).config.prefix_cache == found


def test_a_refused_secret_is_not_shown() -> None:
    assert "hunter two" not in refusal({"admin_key": "hunter two"})


def test_secrets_are_masked_wherever_the_configuration_is_printed() -> None:
    config = ServiceConfig.model_validate({"api_keys": "s3cret", "admin_key": "s3cret"})
    assert "s3cret" not in f"{config!r} {config} {config.model_dump(mode='json')} {config.model_dump_json()}"


@pytest.mark.parametrize(
    ("settings", "on_cpu", "on_cuda"),
    [
        ({}, GIB, 8 * GIB),
        ({"kv_cache": "2.5GiB"}, int(2.5 * GIB), int(2.5 * GIB)),
        ({"kv_cache": "50 %"}, 5 * GIB, 5 * GIB),
    ],
)
def test_memory_for_keys_and_values(settings: dict[str, str], on_cpu: int, on_cuda: int) -> None:
    config = ServiceConfig.model_validate(settings)
    assert config.kv_cache_bytes("cpu", 10 * GIB) == on_cpu
    assert config.kv_cache_bytes("cuda", 10 * GIB) == on_cuda
    assert config.kv_cache_bytes("cpu", 0, states_bytes=7) == config.kv_cache_bytes("cpu", 0) + 7 * (not settings)


@pytest.mark.parametrize(
    ("settings", "name", "source", "revision"),
    [
        ({}, "smollm2-135m", "smollm2-135m", None),
        ({"model": "org/name"}, "org/name", "org/name", None),
        ({"model": "org/name@v1"}, "org/name", "org/name", "v1"),
        ({"model": "/models/a@b"}, "a@b", "/models/a@b", None),
        ({"model": "some.Q4_1.gguf"}, "some.Q4_1", "some.Q4_1.gguf", None),
        ({"model": "org/name", "served_model_name": "mine"}, "mine", "org/name", None),
    ],
)
def test_the_name_clients_use_and_where_the_model_is(
    settings: dict[str, str], name: str, source: str, revision: str | None
) -> None:
    config = ServiceConfig.model_validate(settings)
    assert (config.public_model_name, config.model_source, config.revision) == (name, source, revision)


def test_a_section_is_set_by_file_variable_and_flag(tmp_path: Path) -> None:
    file = written(tmp_path, "adaptation:\n  alpha: 0.3\n  s_min: 5\n  policy: never\nport: 1\n")
    environ = {"ADAPTREE_ADAPTATION__ALPHA": "0.4", "ADAPTREE_ADAPTATION__S_MIN": "6"}
    loaded = load_config({"config": file, "adaptation.alpha": "0.5"}, environ)
    assert loaded.config.adaptation == AdaptationConfig(alpha=0.5, s_min=6.0, policy="never")
    assert loaded.config.port == 1
    origin = {name: source for name, source in loaded.origin.items() if source != "default"}
    assert origin == {
        "adaptation.alpha": "flag --adaptation.alpha",
        "adaptation.s_min": "environment ADAPTREE_ADAPTATION__S_MIN",
        "adaptation.policy": f"file {file}",
        "port": f"file {file}",
    }


@pytest.mark.parametrize("text", ["# nothing\n", "adaptation:\n", "adaptation: {}\n"])
def test_an_empty_file_or_section_changes_nothing(tmp_path: Path, text: str) -> None:
    assert load_config({"config": written(tmp_path, text)}, {}).config == ServiceConfig()


def test_a_pair_of_numbers_is_written_with_a_comma() -> None:
    assert load_config({"adaptation.epsilon": "0.2,0.1"}, {}).config.adaptation.epsilon == (0.2, 0.1)
    environ = {"ADAPTREE_ADAPTATION__EPSILON": "0.4, 0.2"}
    assert load_config({}, environ).config.adaptation.epsilon == (0.4, 0.2)


def test_settings_of_a_section_that_do_not_fit_are_all_named() -> None:
    message = refusal({"adaptation.epsilon": "0.3,0.9"}, {"ADAPTREE_ADAPTATION__ALPHA": "0.2"})
    assert message == (
        "adaptation is invalid: epsilon must be two shares, the second not above the first. Fix: change "
        "adaptation.alpha (from environment ADAPTREE_ADAPTATION__ALPHA), adaptation.epsilon (from flag "
        "--adaptation.epsilon)."
    )


def test_the_example_file_holds_every_setting_and_sets_none() -> None:
    text = (ROOT / "deploy" / "config" / "example.yaml").read_text()
    assert yaml.safe_load(text) is None
    uncommented = yaml.safe_load("\n".join(line[2:] for line in text.splitlines() if _is_setting(line)))
    assert set(flat_values(uncommented)) == set(SETTINGS)
    assert AdaptationConfig.model_validate(uncommented["adaptation"]) == AdaptationConfig()
    assert load_config(flat_values(uncommented), {}).config.max_budget == ServiceConfig().max_budget


def _is_setting(line: str) -> bool:
    name = line[2:].split(":")[0]
    return line.startswith("# ") and (name in ServiceConfig.model_fields or f"adaptation.{name.strip()}" in SETTINGS)


def test_the_flag_names_the_file_before_the_variable_does(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1\n")
    assert load_config({"config": file}, {"ADAPTREE_CONFIG": "elsewhere.yaml"}).config.port == 1


def test_there_are_few_settings() -> None:
    assert len(SETTINGS) <= 48


def test_a_home_folder_is_expanded() -> None:
    assert "~" not in str(load_config({"state_dir": "~/state"}, {}).config.state_dir)


# Every sampling parameter is in the engine, in the bodies of all three routes and in the guide.


def rows() -> Iterator[str]:
    """The rows of the table in docs/api.md."""
    for name, schema in SamplingFields.model_json_schema()["properties"].items():
        kind = schema["anyOf"][0]
        limits = [kind[key] for key in ("minimum", "maximum") if key in kind]
        is_range = len(limits) == 2 and kind["type"] == "number"
        values = f"{limits[0]:g} to {limits[1]:g}" if is_range else kind["type"]
        yield f"| `{name}` | {values} | {schema['description']} |"


def test_the_guide_has_the_table() -> None:
    table = "\n".join(rows())
    assert table in (ROOT / "docs" / "api.md").read_text(), f"replace the table of sampling parameters by\n{table}"


def test_every_field_reaches_the_engine() -> None:
    resolved = {field.name for field in fields(SamplingParams)} - {"max_tokens", "num_logprobs"}
    assert resolved == SamplingFields.model_fields.keys()


@pytest.mark.parametrize("body", [ChatCompletionRequest, CompletionRequest, ResponsesRequest])
def test_every_route_accepts_every_field(body: type[SamplingFields]) -> None:
    declared = SamplingFields.model_fields.items()
    assert all(repr(body.model_fields[name]) == repr(field) for name, field in declared)
