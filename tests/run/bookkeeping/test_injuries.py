"""Injured run folders: no verb takes damage for absence, changes what is sound, or ends in a traceback."""

import pytest

from injuries import GOING_ON, KINDS, REAL, Folders, drawn, problems, verbs_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, forks: None) -> Folders:
    return Folders(tmp_path_factory.mktemp("injured"))


@pytest.mark.sampled(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_names_an_injured_file_or_does_what_it_does_without_the_injury(kind: str, folders: Folders) -> None:
    place = KINDS.index(kind)
    wrong: list[str] = []
    for k in range(6):
        injury = drawn(folders, place + k * len(KINDS))
        verbs = verbs_of(injury, all_of_them=False)
        for verb in (*verbs, *(GOING_ON[:1] if kind in REAL and k == 0 else ())):
            wrong += [f"{injury}: {verb}: {problem}" for problem in problems(folders, injury, verb)]
    assert not wrong, "\n".join(wrong)
