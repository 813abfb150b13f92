"""One loaded tiny model for all tests of the folder."""

import pytest

from service.assembly import Assembly
from tests.service.bench.parts import assembled, save_two_layers


@pytest.fixture(scope="session")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(save_two_layers(tmp_path_factory.mktemp("two-layers")))
