"""The virtual cluster, one for all tests of a worker, and free of jobs for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.virtual_slurm import VirtualSlurm, missing, virtual_slurm


@pytest.fixture(scope="session")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    """A cluster that is started when a test first asks for it."""
    if text := missing():
        pytest.skip(text)
    with virtual_slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: VirtualSlurm) -> Iterator[VirtualSlurm]:
    """The cluster without a job; what a test leaves on it is ended."""
    one_cluster.clear()
    yield one_cluster
    one_cluster.clear()
