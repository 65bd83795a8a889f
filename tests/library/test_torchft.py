"""The trajectory of torchft's DiLoCo on FSDP2, in an environment of its own: the last output is in torchft_accepted.txt.

python -m venv .torchft && .torchft/bin/pip install --constraint constraints.txt torch==2.13.0 torchft==0.2.0
GOSSAMER_TORCHFT=.torchft/bin/python pytest -s tests/library/test_torchft.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_sites import free_port

PYTHON = os.environ.get("GOSSAMER_TORCHFT", "")
ORACLE = Path(__file__).with_name("torchft_oracle.py")


def trained(python: str, whose: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The parameters of both sites at the end."""
    address, out = f"127.0.0.1:{free_port()}", folder / whose
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "static",
        "--master-addr",
        "127.0.0.1",
    ]
    sites = [
        subprocess.Popen(
            [python, *words, "--master-port", str(free_port()), str(ORACLE), whose, address, str(out)],
            env={**os.environ, "SITE": str(site), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for site in range(2)
    ]
    output = [site.communicate(timeout=120)[0] for site in sites]
    assert [site.returncode for site in sites] == [0, 0], output
    return [torch.load(f"{out}.{site}", weights_only=True) for site in range(2)]


@pytest.mark.skipif(not PYTHON, reason="needs torchft 0.2.0, in an environment that GOSSAMER_TORCHFT names")
@pytest.mark.timeout(300)
def test_two_sites_of_two_shards_follow_the_diloco_of_torchft_to_rounding(tmp_path: Path) -> None:
    theirs, ours = (
        trained(str(Path(PYTHON).absolute()), "torchft", tmp_path),
        trained(sys.executable, "gossamer", tmp_path),
    )
    for one, other in ((theirs[0], theirs[1]), (ours[0], ours[1])):
        assert all(torch.equal(one[name], other[name]) for name in one), "both sites have the same parameters"
    apart = max(float((theirs[0][name] - p).abs().max() / p.abs().max()) for name, p in ours[0].items())
    print(f"largest difference after three rounds, relative to the largest parameter of its tensor: {apart:.2g}")
    assert apart < 1e-6
