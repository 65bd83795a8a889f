"""Everything that decodes bytes takes spoilt ones, or refuses them in one line: a hundredth of `make fuzz`."""

from pathlib import Path

import pytest

from fuzz import DECODERS, tried

GROUPS = 8
"""Of decoders: each has a test, and a failure names the decoder."""


@pytest.mark.parametrize("group", range(GROUPS))
def test_spoilt_bytes_are_taken_or_refused_in_one_line(group: int, tmp_path: Path) -> None:
    wrong: list[str] = []
    for number, name in enumerate([*DECODERS][group::GROUPS]):
        folder = tmp_path / str(number)
        folder.mkdir()
        wrong += [f"{name}: {one}" for one in tried(name, DECODERS[name](folder), seed=1, share=0.01).wrong]
    assert not wrong, "\n".join(wrong)
