"""Keys as they are configured: hashed at once, with limits that are what they say."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.api_keys import ApiKey
from service.config import ServiceConfig
from service.config_sources import load_config
from service.errors import StartupError

HASH = "sha256:" + hashlib.sha256(b"s3cret").hexdigest()


def loaded(folder: Path, entries: list[Any]) -> ServiceConfig:
    file = folder / "adaptree.yaml"
    file.write_text(yaml.safe_dump({"api_keys": entries}))
    return load_config({"config": file}, {}).config


def refusal(folder: Path, entries: list[Any]) -> str:
    with pytest.raises(StartupError) as caught:
        loaded(folder, entries)
    return str(caught.value)


def test_no_plain_key_is_kept(tmp_path: Path) -> None:
    config = loaded(tmp_path, ["s3cret", {"key": "other"}]).model_copy(update={"admin_key": None})
    held = [entry.key.get_secret_value() for entry in config.api_keys]
    assert held == [HASH, "sha256:" + hashlib.sha256(b"other").hexdigest()]
    admin = load_config({"admin_key": "s3cret"}, {}).config.admin_key
    assert admin is not None
    assert admin.get_secret_value() == HASH


@pytest.mark.parametrize("given", [HASH, HASH.upper().replace("SHA256", "sha256"), {"key": HASH}])
def test_a_hash_is_the_key(tmp_path: Path, given: object) -> None:
    assert loaded(tmp_path, [given]) == loaded(tmp_path, ["s3cret"])


def test_keys_with_and_without_limits_stand_beside_each_other(tmp_path: Path) -> None:
    limits = {
        "name": "acme",
        "requests_per_minute": 60,
        "tokens_per_minute": 9000,
        "max_concurrent": 2,
        "budget_tokens": 10**6,
    }
    plain, limited = loaded(tmp_path, ["a", {"key": "b", **limits}]).api_keys
    assert plain == ApiKey.model_validate("a")
    assert {name: getattr(limited, name) for name in limits} == limits


def test_neither_keys_nor_their_hashes_are_shown(tmp_path: Path) -> None:
    config = loaded(tmp_path, [{"key": "s3cret", "name": "acme"}])
    shown = f"{config!r} {config} {config.model_dump(mode='json')} {config.model_dump_json()}"
    assert "acme" in shown
    assert not any(secret in shown for secret in ("s3cret", HASH.removeprefix("sha256:")))
    assert config.model_dump(mode="json")["api_keys"] == [{"key": "**********", "name": "acme"}]


@pytest.mark.parametrize(
    ("entry", "reported"),
    [
        ({"key": "b", "requests_per_hour": 1}, "requests_per_hour of entry 2: extra inputs are not permitted"),
        ({"name": "b"}, "key of entry 2: field required"),
        ({"key": "b", "budget_tokens": 0}, "budget_tokens of entry 2: input should be greater than or equal to 1"),
        ({"key": "b", "max_concurrent": True}, "max_concurrent of entry 2: input should be a valid integer"),
        ({"key": "b", "tokens_per_minute": 1.5}, "tokens_per_minute of entry 2: input should be a valid integer"),
        ({"key": "b", "name": "a b"}, "name of entry 2: string should match pattern"),
        ({"key": "sha256:12"}, "key of entry 2: sha256: must be followed by the 64 hexadecimal digits"),
        ({"key": "s3cret word"}, "key of entry 2: a key must not be empty or contain spaces"),
        (17, "entry 2: input should be a valid dictionary"),
        ({"key": "a", "max_concurrent": 1}, "two different entries have the same key"),
        ({"key": "b", "name": "one"}, "two different entries have the same name"),
    ],
)
def test_an_impossible_entry_names_its_field_and_no_secret(tmp_path: Path, entry: object, reported: str) -> None:
    message = refusal(tmp_path, [{"key": "a", "name": "one"}, entry])
    assert message.startswith("api_keys = (secret), from file")
    assert reported in message
    assert message.endswith("it takes keys, or in a file entries of " + ", ".join(ApiKey.model_fields) + ".")
    assert "s3cret" not in message


def test_a_key_may_be_repeated(tmp_path: Path) -> None:
    assert loaded(tmp_path, ["a", "a"]) == loaded(tmp_path, ["a"])
