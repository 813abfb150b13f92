"""One home each: the environment, Prometheus, Redis; and the name `kernels`, which others probe for."""

import pytest

import service
from tests.architecture.rules import (
    PACKAGES,
    ROOT,
    complaints,
    environment_reads,
    imports_of,
    module_name,
    modules,
    statements_beside_version,
)

# The configuration (a default, and what was set), and which build of the kernels is to be compared.
READERS = {"service.config", "service.config_sources", "kernels.cpu.library"}
HOMES = {
    "prometheus_client": "service.observability.metrics",
    "redis": "adaptation.replicas.redis_store",
    "ray": "service.ray_serve",
}


def test_only_the_configuration_reads_the_environment() -> None:
    assert complaints(modules(*PACKAGES), environment_reads).keys() <= READERS


@pytest.mark.parametrize(("library", "home"), HOMES.items())
def test_a_library_stays_in_its_home(library: str, home: str) -> None:
    strangers = {module_name(path) for path in modules(*PACKAGES) if imports_of(path.read_text(), [library])}
    assert strangers <= {home}


def test_the_name_kernels_holds_a_docstring_and_a_version() -> None:
    source = (ROOT / "kernels" / "__init__.py").read_text()
    assert statements_beside_version(source) == []
    assert '__version__ = "0.1.0"' in source


def test_the_distribution_stays_below_what_transformers_takes_for_its_kernels_package() -> None:
    assert tuple(int(part) for part in service.__version__.split(".")) < (0, 9)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os as system\nx = system.getenv('A')",
        "from os import environ",
        "from os import getenv as read",
        "import os\ndef f(): return os.environ.get('A')",
    ],
)
def test_a_read_of_the_environment_is_seen(source: str) -> None:
    assert environment_reads(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import prometheus_client as p",
        "from prometheus_client.core import Metric",
        "def f():\n    import prometheus_client",
    ],
)
def test_a_library_away_from_home_is_seen(source: str) -> None:
    assert len(imports_of(source, ["prometheus_client"])) == 1


@pytest.mark.parametrize("source", ["import torch", '"""Text."""\n__version__ = make()', '"""Text."""\n"""More."""'])
def test_more_than_a_version_is_seen(source: str) -> None:
    assert len(statements_beside_version(source)) == 1
