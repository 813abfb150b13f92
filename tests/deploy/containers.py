"""Containers without a daemon: images built by buildah on a Debian of debootstrap, the composition run by podman."""

import ast
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.rules import ROOT
from tests.deploy.programs import program
from tests.environments import python_environment

BASE = "localhost/debian-python:12"
_PROJECT = "adaptree-test"
_PYTHON = "python3,python3-venv,ca-certificates"
_PROCESSES = 4096
_SETTINGS = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
[network]
network_config_dir = "{folder}/networks"
"""
"""Limits that a process may set without further rights; crun does not start beside control groups of both versions."""
_STAND_INS = {
    # The official image has no protected mode either.
    "redis": """WORKDIR /data
RUN printf '#!/bin/sh\\nexec /usr/bin/redis-server "$@" --protected-mode no\\n' > /usr/local/bin/redis-server \\
    && chmod +x /usr/local/bin/redis-server
""",
    "prometheus": """WORKDIR /prometheus
RUN chown nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
""",
}
"""Debian's packages in place of the images of other publishers, by service."""
_PACKAGES = {"redis": "redis-server", "prometheus": "prometheus"}


@dataclass(frozen=True)
class Containers:
    """Images and containers of a folder of their own."""

    folder: Path

    def run(self, *command: str | Path, seconds: float = 1800) -> str:
        """What a program prints, which must not fail."""
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=self._environ(), capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def podman(self, *arguments: str | Path) -> str:
        """What podman prints."""
        return self.run(program("podman"), *arguments).strip()

    def compose(self, *arguments: str) -> str:
        """What podman-compose prints, for the profile of a CPU."""
        environment = python_environment(Path(__file__).with_name("compose.txt"))
        # Docker has no temporary file systems beside those that are named.
        options = ["-p", _PROJECT, "-f", str(self.folder / "docker-compose.yml"), "--profile", "cpu"]
        strict = ["--podman-run-args=--read-only-tmpfs=false"] if arguments[0] == "up" else []
        return self.run(environment / "bin" / "podman-compose", *options, *strict, *arguments)

    def name_of(self, service: str) -> str:
        """The container of a service of the composition."""
        return f"{_PROJECT}_{service}_1"

    def _environ(self) -> Mapping[str, str]:
        files = min(20_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        settings, storage = self.folder / "containers.conf", self.folder / "storage.conf"
        settings.write_text(_SETTINGS.format(files=files, processes=_PROCESSES, folder=self.folder))
        kept = {"graphroot": self.folder / "images", "runroot": self.folder / "run"}
        lines = [f'{name} = "{path}"' for name, path in kept.items()]
        storage.write_text("\n".join(["[storage]", 'driver = "overlay"', *lines, ""]))
        chosen = {"CONTAINERS_CONF": settings, "CONTAINERS_STORAGE_CONF": storage}
        return {**os.environ, **{name: str(path) for name, path in chosen.items()}}


@contextmanager
def begun() -> Iterator[Containers]:
    """In a folder that is left out of pytest's: what a run that was killed leaves mounted there cannot be removed."""
    with tempfile.TemporaryDirectory(prefix="adaptree-containers-") as folder:
        containers = Containers(Path(folder))
        try:
            yield containers
        finally:
            containers.podman("rm", "--all", "--force", "--time", "0", "--volumes")
            containers.podman("rmi", "--all", "--force")
            subprocess.run(["umount", containers.folder / "images" / "overlay"], check=False)


def build(containers: Containers, images: Mapping[str, str]) -> None:
    """Make all images of the composition but Grafana's; `images`: their names, by service."""
    system = containers.folder / "debian"
    containers.run(program("debootstrap"), "--variant=minbase", f"--include={_PYTHON}", "bookworm", system)
    archive = containers.folder / "debian.tar"
    containers.run("tar", "-C", system, "--exclude=./var/cache/apt/archives/*.deb", "-cf", archive, ".")
    containers.podman("import", archive, BASE)
    archive.unlink()
    shutil.rmtree(system)
    # Where Docker has its own format by default, which alone has health checks.
    command = [program("buildah"), "bud", "--isolation", "chroot", "--format", "docker", "--layers=false"]
    mounts = [word for path in _pip_settings(containers.folder) for word in ("--volume", path)]
    ignored = str(ROOT / "deploy" / "Dockerfile.dockerignore")
    service = [*mounts, "--ignorefile", ignored, "--build-arg", f"BASE={BASE}", "-t", images["adaptree"]]
    containers.run(*command, *service, "-f", ROOT / "deploy" / "Dockerfile", ROOT)
    for name, rest in _STAND_INS.items():
        file = containers.folder / f"{name}.Dockerfile"
        install = f"apt-get update && apt-get install -y --no-install-recommends {_PACKAGES[name]}"
        file.write_text(f"FROM {BASE}\nRUN {install}\n{rest}")
        containers.run(*command, "-t", f"docker.io/{images[name]}", "-f", file, containers.folder)


def _pip_settings(folder: Path) -> list[str]:
    """What to mount so that pip finds packages in a build where it finds them here: its settings, and the files that
    they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"^[\w:]+\.\.?([\w-]+)=(.*)$", listed.stdout, re.MULTILINE))
    values = {name: str(ast.literal_eval(value)) for name, value in settings.items()}
    file = folder / "pip.conf"
    file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in values.items()), ""]))
    named = {Path(word) for value in values.values() for word in value.split() if word.startswith("/")}
    # An index of files links to files beside it.
    named |= {Path(url).parent for value in values.values() for url in re.findall(r"file://(/\S+)", value)}
    return [f"{file}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(named) if path.exists())]
