"""The runs of Gossamer's peers are bounded, and say why they ended."""

import stat
import time
from pathlib import Path

import peers
import pytest


@pytest.mark.parametrize(
    ("work", "limit_s", "codes"),
    [("sleep 60", 1.0, r"\[None, None, None, None\]"), ("exit 3", 40.0, r"\[.*3.*\]")],
    ids=["hangs", "fails"],
)
def test_a_run_that_hangs_or_fails_ends_and_shows_what_its_processes_complain_about(
    work: str, limit_s: float, codes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho rank $3 stands still >&2\n{work}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(peers, "LIMIT_S", limit_s)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match=f"the processes of post_local_sgd ended with {codes} after") as error:
        peers.measured("post_local_sgd", str(python))
    assert "stands still" in str(error.value)
    assert time.monotonic() - began_s < 50
