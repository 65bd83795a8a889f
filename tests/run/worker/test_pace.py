"""Paced inner steps: as slow as declared, and otherwise the same run."""

from pathlib import Path

import pytest

from gossamer.errors import ConfigError
from gossamer.record.logs.trace import read_trace
from gossamer.run.config.run_file import digest, parse
from gossamer.run.simulated.simulate import simulate

RUN = {"workers": 2, "model": {"size": "0.2m"}, "data": {"seq_len": 8, "batch_size": 1, "max_bytes": 50_000}}
LOOP = {"steps": 4, "local_steps": [4, 2], "eval_every": 0, "eval_batches": 1}


def test_inner_steps_take_at_least_their_pace_and_nothing_else_changes(tmp_path: Path) -> None:
    paced = parse({**RUN, "run": {**LOOP, "pace_s": 0.1}})
    assert digest(paced) == digest(parse({**RUN, "run": LOOP}))
    simulate(paced, tmp_path / "run")
    compute_s = read_trace(tmp_path / "run").compute_s
    assert compute_s[0, 0] >= 0.4
    assert compute_s[0, 1] >= 0.2


def test_a_negative_pace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.pace_s is -1"):
        parse({**RUN, "run": {**LOOP, "pace_s": -1.0}})
