"""A process server and one uninterrupted run of each kind for all fault tests."""

import pytest
import yaml

from tests.faults.runs import Forge, output


@pytest.fixture(scope="session")
def forge():
    forge = Forge()
    yield forge
    forge.close()


@pytest.fixture(scope="session")
def undisturbed(forge, tmp_path_factory):
    """Directories of uninterrupted runs; each configuration is run once."""
    known = {}

    def of(config, **request):
        key = yaml.safe_dump(config)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("undisturbed")
            assert forge.attempt(known[key], config, **request) == 0, output(known[key])[-4000:]
        return known[key]

    return of
