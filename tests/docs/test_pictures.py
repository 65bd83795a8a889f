"""What `benchmarks/pictures.py` draws."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
assert spec is not None and spec.loader is not None
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def test_the_animation_draws_the_pairs_of_each_round_and_the_spread_of_worker_0s_information() -> None:
    rounds = [[(0, 1), (2, 3)], [(1, 2)]]
    assert pictures.reach(rounds) == [0, 1, 2, None]
    drawn = ElementTree.fromstring(pictures.animation(rounds, [3.0, 2.5]))
    of = "{http://www.w3.org/2000/svg}"
    assert len([*drawn.iter(f"{of}line")]) == 3
    assert [one.get("class") for one in drawn.findall(f"{of}circle")].count("full") == 3, "worker 3 never has"
    assert "round 2: training loss 2.50" in ["".join(text.itertext()) for text in drawn.findall(f"{of}text")]


def test_the_committed_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert all(size < (50_000 if name == "gossip.svg" else 150_000) for name, size in sizes.items()), sizes
