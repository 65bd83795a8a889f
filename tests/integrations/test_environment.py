"""One script, unchanged: what GOSSAMER_OUTER asks for."""

import os
import re

import pytest
import torch

import gossamer
from commands import Command, free_port, program
from gossamer.errors import ConfigError
from gossamer.integrations import as_worker
from gossamer.integrations.environment import rule_and_options
from gossamer.library.parts import must_be_what_is_asked

JOINED = {"GOSSAMER_OUTER": "diloco:3@10.0.0.1:29600", "GOSSAMER_SITE": "1/2"}


def test_a_method_its_steps_and_where_sites_meet_are_read_from_one_variable():
    assert rule_and_options(None, {}, {"GOSSAMER_OUTER": "gasloc"}) == ("gasloc", {})
    assert rule_and_options(None, {}, {"GOSSAMER_OUTER": "gasloc:7"}) == ("gasloc", {"local_steps": 7})
    asked = {"local_steps": 3, "site": (1, 2), "join": "10.0.0.1:29600"}
    assert rule_and_options(None, {}, JOINED) == ("diloco", asked)
    with_keys = rule_and_options(None, {"seed": 5}, {**JOINED, "GOSSAMER_PEERS": "peers.toml"})
    assert with_keys == ("diloco", {**asked, "seed": 5, "peers": "peers.toml", "elastic": True})
    assert rule_and_options("gossip", {"local_steps": 2}, {}) == ("gossip", {"local_steps": 2})
    streaming, _ = rule_and_options(None, {}, {"GOSSAMER_OUTER": "streaming_diloco:10"})
    assert streaming.name == "streaming_diloco"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("OUTER", "diloco"),
        ("OUTER", "diloco:3"),
        ("OUTER", "gasloc:30"),
        ("OUTER", "gasloc:3@10.0.0.1:29600"),
        ("SITE", "0/2"),
        ("PEERS", "peers.toml"),
    ],
)
def test_an_outer_that_does_not_read_what_is_asked_for_is_refused(name, asked, monkeypatch):
    monkeypatch.setenv(f"GOSSAMER_{name}", asked)
    said = (
        f"GOSSAMER_{name} is '{asked}' and Outer, which does not read it, got rule 'gasloc', local_steps=2, site=None, "
    )
    with pytest.raises(ConfigError, match=f"{said}join=None and peers=None; use .* or unset GOSSAMER_{name}$"):
        gossamer.Outer(torch.nn.Linear(2, 1), gossamer.gasloc(), local_steps=2)


def test_an_outer_that_agrees_with_what_is_asked_for_is_made(monkeypatch):
    monkeypatch.setenv("GOSSAMER_OUTER", "diloco:30")
    for given in ({}, {"local_steps": 30}):
        assert gossamer.Outer(torch.nn.Linear(2, 1), "diloco", **given).local_steps == 30
    must_be_what_is_asked("diloco", 3, (1, 2), "10.0.0.1:29600", None, {**JOINED, "GOSSAMER_SITE": "01/02"})
    with pytest.raises(ConfigError, match="and GOSSAMER_SITE is '1/2' and Outer, which does not read them, got"):
        must_be_what_is_asked("diloco", 3, (0, 2), "10.0.0.1:29600", None, JOINED)
    monkeypatch.setenv("GOSSAMER_OUTER", "streaming_diloco:30")
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    with gossamer.outer_loop(model, torch.optim.SGD(model.parameters(), lr=0.1)) as loop:
        assert loop.local_steps == 30


@pytest.mark.parametrize(
    ("rule", "options", "environment", "sentence"),
    [
        (None, {}, {}, "no rule was given and GOSSAMER_OUTER is not set"),
        ("gasloc", {}, {"GOSSAMER_OUTER": "diloco"}, "is 'diloco', and the script gives a rule too"),
        (None, {"local_steps": 5}, {"GOSSAMER_OUTER": "diloco:3"}, "the script gives local_steps too"),
        (None, {}, {"GOSSAMER_OUTER": "diloco:0"}, r"set it to METHOD\[:H\]\[@HOST:PORT\]"),
        (None, {}, {"GOSSAMER_OUTER": "diloco@host"}, r"set it to METHOD\[:H\]\[@HOST:PORT\]"),
        (None, {}, {"GOSSAMER_OUTER": "diloco:3@s3://bucket/run:80"}, r"set it to METHOD\[:H\]\[@HOST:PORT\]"),
        (None, {}, {"GOSSAMER_OUTER": "diloko"}, "did you mean 'diloco'"),
        (
            None,
            {},
            {"GOSSAMER_OUTER": "diloco:3@host:1"},
            "GOSSAMER_SITE is not set; set it to the number of this site",
        ),
        (None, {}, {"GOSSAMER_OUTER": "diloco", "GOSSAMER_SITE": "0/2"}, "as in diloco@HOST:PORT"),
        (None, {}, {**JOINED, "GOSSAMER_SITE": "2/2"}, "GOSSAMER_SITE is '2/2'"),
    ],
)
def test_what_is_asked_for_twice_or_in_another_form_is_refused(rule, options, environment, sentence):
    with pytest.raises(ConfigError, match=sentence):
        rule_and_options(rule, options, environment)


@pytest.mark.parametrize(
    ("environment", "place", "warned"),
    [
        ({}, (0, 1), True),
        ({"GOSSAMER_OUTER": "diloco"}, (0, 1), True),
        ({"GOSSAMER_SITE": "1/2"}, (1, 2), False),
        (JOINED, (1, 2), False),
    ],
    ids=["nothing", "a method", "a site", "where sites meet"],
)
def test_a_lone_process_is_the_site_that_the_environment_names_or_warned_that_it_may_be_the_only_worker(
    environment, place, warned, monkeypatch, caplog
):
    for name in [name for name in os.environ if name.startswith("GOSSAMER_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert as_worker() == as_worker() == place
    assert ["unless site=... or store=... is given later" in one for one in caplog.messages] == [True, True] * warned


SCRIPT = """
import os, torch, gossamer
torch.manual_seed(int(os.environ["GOSSAMER_SITE"][0]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossamer.outer_loop(model, optimizer) as outer:
    for _ in range(6):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("workers", outer.n, outer.rounds, model.weight.tolist(), flush=True)
"""


def test_two_jobs_of_one_script_train_together_by_their_environment_alone(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    port = free_port()
    meet = {"GOSSAMER_OUTER": f"diloco:3@127.0.0.1:{port}"}
    jobs = [Command(tmp_path / "train.py", work=program, GOSSAMER_SITE=f"{site}/2", **meet) for site in range(2)]
    said = [job.finish(150)[1] for job in jobs]
    ends = [re.findall("^workers 2 2 .*$", text, re.MULTILINE) for text in said]
    assert ends[0] and ends[0] == ends[1], said
