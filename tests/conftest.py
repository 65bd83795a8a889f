"""What all tests share: one intra-op thread, the option for the full parity matrix, and real network namespaces."""

import shutil
import subprocess

import pytest
import torch

torch.set_num_threads(1)  # tests run beside each other and beside their own worker processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-parity",
        action="store_true",
        help="compare simulator and real processes for every rule x topology x codec, not only for a pairwise cover",
    )


@pytest.fixture(scope="session")
def netns() -> None:
    """Skips a test where this machine cannot give workers a network of their own."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)}, which this machine does not have")
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=10)
    if tried.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
