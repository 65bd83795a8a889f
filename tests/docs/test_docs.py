"""The site builds without a warning, loads nothing from other hosts, and what its pages say to type works as written."""

import contextlib
import importlib.metadata
import io
import json
import multiprocessing.process
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import yaml
from test_sites import free_port
from torch.distributed import TCPStore

import generate
import gossamer
from commands import Command, program, run
from generators.command_line import arguments
from generators.methods import python_of
from gossamer import topologies
from gossamer.cli import VERBS, app, main
from gossamer.data.tokenizer import load_tokenizer
from gossamer.models.sizes import ModelConfig
from gossamer.network.links import Network, StepOf, to_toml
from gossamer.run.config.document import load_document, with_settings
from gossamer.run.config.recipes import FACTORIES, recipes
from gossamer.run.config.resolve import resolve
from gossamer.run.config.run_file import parse
from gossamer.run.config.user_parts import named
from gossamer.run.experiments import race
from gossamer.settings.schema import parse_toml
from gossamer.transport.processes.local import loopback
from tiny import TEXT, document

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    generate.write(folder)
    return folder


@pytest.fixture(scope="session")
def site(source):
    """The site, which builds without a warning."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", source / "mkdocs.yml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(mkdocs, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "site"


@pytest.mark.full
def test_the_site_loads_nothing_from_other_hosts_and_has_every_method_and_verb(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link[^>]* rel=[\"']?(?:stylesheet|preconnect|icon)[^>]* href=[\"']?([^\"' >]+)", text)
        assert not [one for one in loaded if one.startswith(("http", "//"))], page
    assert {page.stem for page in (site / "methods").glob("*.html")} == {*recipes(), *FACTORIES, "wrappers"}
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert 'id="gossamer.library.outer.Outer.step"' in python
    commands = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert all(f'id="{verb}"' in commands for verb in VERBS)


@pytest.mark.full
@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_page_that_is_opened_from_a_folder_searches_and_asks_no_other_host(site):
    api = pytest.importorskip("playwright.sync_api")
    asked, errors = [], []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(120_000)  # milliseconds
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "how-to" / "index.html").as_uri())
        page.locator(".md-search__input").first.press_sequentially("straggler")
        page.locator(".md-search-result__link").first.wait_for(state="attached")
        link = page.locator(".md-search-result__link").first.get_attribute("href")
        browser.close()
    assert link is not None and (site / "how-to" / link.partition("?")[0].removeprefix("file://")).exists()
    # Letters that are typed before the index is read find nothing, and the theme says so.
    errors = [one for one in errors if "_index" not in one and "Invalid query" not in one]
    assert all(url.startswith(("file:", "data:", "about:")) for url in asked) and not errors


def test_the_page_of_run_files_explains_every_key(source):
    lines = (source / "docs" / "reference" / "run-file.md").read_text(encoding="utf-8").splitlines()
    keys = [line for line in lines if line.startswith("| `")]
    assert len(keys) > 80
    assert not [line for line in keys if line.endswith("|  |")], "write a docstring under that field"


def test_the_page_of_commands_explains_every_argument(source):
    text = (source / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert "| `--out PATH` | run folder" in text
    assert not re.findall(r"^\| `.*\|  \|$", text, re.MULTILINE)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", recipes())
def test_the_command_on_the_page_of_a_method_can_start(name, source):
    page = (source / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^gossamer simulate .*$", page, re.MULTILINE)
    _, _, file, _, setting = shlex.split(command)
    resolve(parse(with_settings(load_document(ROOT / file), dict([setting.split("=")]))))


def test_the_page_of_a_method_has_python_where_an_own_loop_can_run_it():
    for name, recipe in recipes().items():
        try:
            gossamer.method(name)
        except gossamer.errors.PairingError:
            assert not python_of(recipe.settings), name


@pytest.mark.parametrize("name", [name for name in recipes() if python_of(recipes()[name].settings)])
def test_the_python_on_the_page_of_a_method_makes_it(name):
    settings = recipes()[name].settings
    code = python_of(settings)
    scope: dict[str, Any] = {"model": torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))}
    if made := re.search(r"topologies\.\w+\(workers, .*?\)", code):  # of more workers than there are here
        assert eval(made[0], {"topologies": topologies, "workers": 8}).name == settings["topology.name"]
        code = code.replace(made[0], f'"{settings["topology.name"]}"')
    exec(code, scope)
    with scope["outer"] as outer:
        rule, codec = outer.method.rule, outer.method.codec
        options = {key.removeprefix("rule."): value for key, value in settings.items() if key.startswith("rule.")}
        assert rule.name.endswith(options.pop("name"))
        for key, value in options.items():
            found = rule.options if isinstance(value, dict) else {key: rule.options[key]}
            assert found.items() >= (value if isinstance(value, dict) else {key: value}).items() or value == "auto"
        assert codec.name.startswith(settings.get("codec.name", "exact"))
        assert (codec.back.name if codec.back else None) == settings.get("codec.back")
        schedule = {key: value for key, value in settings.items() if key.startswith("schedule.")}
        assert all(getattr(outer.method.schedule, key.partition(".")[2]) == value for key, value in schedule.items())


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_parts_on_the_page_about_own_parts_train():
    scope: dict[str, Any] = {"gossamer": gossamer, "workers": 1}
    outers = []
    for code in python_blocks("how-to/own-parts.md"):
        scope["model"] = model = torch.nn.Linear(8, 8)
        exec(code, scope)
        if outer := scope.pop("outer", None):
            before = model.weight.detach().clone()
            with outer, torch.no_grad():
                model.weight += 1.0
                assert [outer.step() for _ in range(30)] == [False] * 29 + [True]
            assert not torch.equal(model.weight, before)
            outers.append(outer.method)
    assert [method.rule.name for method in outers] == ["cautious", "gasloc", "diloco"]
    assert outers[2].codec.name == "halves"
    mixings = [scope["pairs"](4).mixing(t) for t in range(2)]
    assert [[mixing.receives_from(i) for i in range(4)] for mixing in mixings] == [
        [(1,), (0,), (3,), (2,)],
        [(), (2,), (1,), ()],
    ]
    assert all(mixing.weight(1) == 0.5 for mixing in mixings)


@pytest.mark.full
def test_the_page_about_simulations_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for code in python_blocks("how-to/simulate.md"):
        exec(code.replace("rounds=10", "rounds=5").replace("until=7", "until=5"), scope)
    assert scope["run"].over and len(scope["found"].runs) == 8 and scope["price"].total_s > 0


def test_the_run_file_on_the_page_about_own_parts_is_one():
    (text,) = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs/how-to/own-parts.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(named(parse(parse_toml(text, "the page")))) == 7


def test_the_methods_on_the_page_about_an_own_loop_can_be_made():
    choices = python_blocks("how-to/own-loop.md")[1].splitlines()
    lines = [line for line in choices if line.startswith("outer = ")]
    assert len(lines) == 4
    for line in lines:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        scope: dict[str, Any] = {"model": model}
        exec(f"{choices[0]}\n{line}", scope)
        scope["outer"].close()


@pytest.mark.full
def test_the_tutorial_works_as_written(tmp_path, monkeypatch):
    """With fewer and shorter steps of a model of one layer; the commands are those of the page, in their order."""
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```toml title=\"(.+?)\"\n(.*?)```", TUTORIAL, re.DOTALL):
        text = text.replace("steps = 240", "steps = 10").replace("local_steps = 15", "local_steps = 5")
        text = text.replace("seq_len = 64", "seq_len = 16")
        text = text.replace('size = "0.2m"', 'size = "0.2m", layers = 1')
        Path(name).write_text(text, encoding="utf-8")
    assert all(
        part in Path("first.toml").read_text(encoding="utf-8")
        for part in ("\nsteps = 10\n", "\nlocal_steps = 5\n", "seq_len = 16", "layers = 1")
    )
    printed: dict[str, str] = {}
    for command in re.findall(r"^\$ gossamer (.+)$", TUTORIAL, re.MULTILINE):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(shlex.split(command)) == 0, command
        printed[command] = out.getvalue()
    assert {"report.html", "model", "checkpoints", "trace.jsonl", "run.toml"} <= {
        one.name for one in Path("runs/first").iterdir()
    }

    def number(pattern: str, command: str) -> float:
        match = re.search(pattern, printed[command])
        assert match, printed[command]
        return float(match[1])

    gasloc, diloco = (number(r"([\d.]+) s for", f"price runs/{run} network.toml") for run in ("first", "diloco"))
    assert gasloc < diloco
    real = number(r"mean model ([\d.]+) nats", "evaluate runs/real")
    assert real == number(r"first +│ +([\d.]+)", "simulate first.toml --set workers=2 --out runs/two")
    assert Path("plan.toml").is_file()


@pytest.mark.full
def test_the_commands_on_the_page_about_which_method_work_as_written(tmp_path, monkeypatch, capsys):
    """After a probe of two workers, which is written here; the race has a smaller model, a shorter way and two seeds."""
    monkeypatch.chdir(tmp_path)
    network = Network(uplink_bps=(1e8, 5e7), downlink_bps=1e8, latency_s=0.01, step_s=(0.5, 0.5), step_of=StepOf())
    Path("network.toml").write_text(to_toml(network), encoding="utf-8")
    smallest = ModelConfig(size="0.2m", layers=2, hidden_size=32, intermediate_size=64)
    monkeypatch.setattr(race, "courses", lambda made, some: [race.course_of(made, some, smallest, 0.1)])
    monkeypatch.setattr(race, "MOST_SEEDS", 2)
    page = (ROOT / "docs" / "how-to" / "which-method.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"```toml title=\"(.+?)\"\n(.*?)```", page, re.DOTALL):
        Path(name).write_text(text, encoding="utf-8")
    ran = []
    for words in map(shlex.split, re.findall(r"^gossamer .+$", page, re.MULTILINE)):
        if words[1] != "probe":  # which README has too
            quick = (
                ["--data", str(TEXT), "--local-steps", "5,15", "--jobs", "1", "--quiet"] if "--race" in words else []
            )
            ran.append(words[1:])
            assert main([*words[1:], *quick]) == 0, words
            output = capsys.readouterr().out
            assert ("verdict: " in output) == ("--race" in words)
            assert "by the law: after about" in output or "--law" not in words
    assert len(ran) == 5 and Path("run.toml").is_file() and Path("runs/race-network-1m/report.html").is_file()


def test_the_commands_on_the_page_about_data_work_as_written(tmp_path, monkeypatch, capfd):
    """On a text and on files of tokens that are written here, with a tokenizer that is bytes under another name."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(tomli_w.dumps(document(run__steps=2)), encoding="utf-8")
    Path("notes.jsonl").write_text("".join(json.dumps({"text": f"note {k} " * 9}) + "\n" for k in range(99)))
    Path("tokenizer.json").write_text(load_tokenizer("bytes").json(), encoding="utf-8")
    Path("fineweb").mkdir()
    ids = np.random.default_rng(0).integers(1, 128, 10_500).astype("<u2")
    header = np.array([20240520, 1, 500, *[0] * 253], "<i4").tobytes()
    Path("fineweb/train_000001.bin").write_bytes(ids[:10_000].tobytes())
    Path("fineweb/val_000000.bin").write_bytes(header + ids[10_000:].tobytes())
    page = (ROOT / "docs" / "how-to" / "data.md").read_text(encoding="utf-8")
    commands = re.findall(r"^gossamer .+$", page, re.MULTILINE)
    assert len(commands) == 4
    for words in map(shlex.split, commands):
        assert main([*words[1:]]) == 0, words
    output = "".join(capfd.readouterr())
    match = re.search(r"^text of 'fineweb.+$", page, re.MULTILINE)
    assert match and match[0] in output


AGENTS: list[TCPStore] = []
"""Stores of launchers, which live as long as this process."""


def torchrun(processes, *words, **environment):
    """The processes that `torchrun --nproc-per-node PROCESSES WORDS` starts, with a store of the launcher's as there."""
    AGENTS.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    launched = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": AGENTS[-1].port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "GLOO_SOCKET_IFNAME": loopback(),
    }
    launched = {key: str(value) for key, value in launched.items()} | environment
    return [Command(*words, work=program, RANK=str(k), LOCAL_RANK=str(k), **launched) for k in range(processes)]


@pytest.mark.full
@pytest.mark.timeout(180)
def test_the_page_about_two_machines_on_ethernet_trains_two_sites_as_written(tmp_path, monkeypatch, capsys):
    """Two jobs of two processes on loopback, in place of two machines."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / "ethernet.md").read_text(encoding="utf-8")
    for kind, name, text in re.findall(r"```(toml|python) title=\"(.+?)\"\n(.*?)```", page, re.DOTALL):
        Path(name).write_text(text, encoding="utf-8")
        assert kind in name or name == "train.py"
    [plans] = re.findall(r"^gossamer plan .+$", page, re.MULTILINE)
    assert main(shlex.split(plans)[1:]) == 0
    computing = {
        row.split()[0]: float(share) for row, share in re.findall(r"^(.+?)\s+(\d+\.\d)%", capsys.readouterr().out, re.M)
    }
    assert computing["data"] < 15 < 90 < computing["DiLoCo"]
    [line] = re.findall(r"^SITE=0 .+$", page, re.MULTILINE)
    given, words = line.split(" torchrun ")
    *launcher, program = shlex.split(words)
    assert launcher == ["--nproc-per-node", "2"]
    first, sites = free_port(), []
    for site in range(2):
        named = dict(one.split("=") for one in given.split()) | {"SITE": str(site), "FIRST": f"127.0.0.1:{first}"}
        sites.append(torchrun(2, program, **named))
    ends = [[one.finish(120) for one in site] for site in sites]
    assert all(code == 0 for site in ends for code, _ in site), ends
    assert all(f"site {site}: 3 rounds, loss" in "".join(output for _, output in ends[site]) for site in range(2)), ends


LOOP_LIKE_NANOGPT = """
import os
import torch
ddp = "RANK" in os.environ
if ddp:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(1337 + int(os.environ["RANK"]))
device = "cpu"
model = torch.nn.Linear(4, 1)
model.to(device)
scaler = torch.amp.GradScaler(device, enabled=False)
optimizer = torch.optim.AdamW(model.parameters())
if ddp:
    raise SystemExit("DistributedDataParallel would average gradients")
for iter_num in range(200):
    scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
torch.distributed.barrier()
os.write(1, f"rounds {outer.rounds} weights {model.weight.tolist()}\\n".encode())
"""


@pytest.mark.full
def test_the_lines_on_the_page_about_an_own_loop_make_a_loop_like_that_of_nanogpt_one_of_workers(tmp_path):
    page = (ROOT / "docs" / "how-to" / "own-loop.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?:`(.+?)`)? ?\| `(.+?)` \|$", page.partition("## nanoGPT")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert len(rows) == 4
    code, after = LOOP_LIKE_NANOGPT, ""
    for line, added in rows:
        after = line or after
        assert code.count(f"\n{after}\n") == 1, after
        code = code.replace(f"\n{after}\n", f"\n{after}\n{added}\n")
        after = added
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    ends = [one.finish(120) for one in torchrun(2, tmp_path / "train.py")]
    printed = [line for _, output in ends for line in re.findall(r"rounds 2 weights .+", output)]
    assert len(printed) == 2 and len({*printed}) == 1, ends


def titled(page: str) -> str:
    """Writes the files that a page has, with their titles, into the working folder; returns the page."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    for name, content in re.findall(r"```\w+ title=\"(.+?)\"\n(.*?)```", text, re.DOTALL):
        Path(name).write_text(content, encoding="utf-8")
    return text


@pytest.mark.full
def test_the_page_about_an_outer_optimizer_of_ones_own_compares_it_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = titled("compare-my-own.md")
    smaller(Path("mine.toml"), run="{ steps = 4, local_steps = 2, eval_every = 4, eval_batches = 1 }")
    smaller(Path("mine.toml"), model='{ size = "0.2m", layers = 1, hidden_size = 32, intermediate_size = 64 }')
    smaller(Path("mine.toml"), data=f'{{ source = "{TEXT}", seq_len = 16, batch_size = 2 }}')
    smaller(Path("mine.toml"), inner="{ lr = 2e-3 }")
    commands = {words[1]: words[1:] for words in map(shlex.split, re.findall(r"^gossamer .+$", page, re.MULTILINE))}
    assert [*commands] == ["compare", "check"]
    for words in (commands["check"], [*commands["compare"], "--quiet"]):
        assert main(words) == 0, words
    output = capsys.readouterr().out
    assert "signed: can start" in output and re.search(r"^signed: .+ over 3 seeds", output, re.MULTILINE)
    assert Path("runs/mine/report.html").is_file()
    [line] = re.findall(r"^python -c (.+)$", page, re.MULTILINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(shlex.split(line)[0], {})


@pytest.mark.full
def test_the_page_about_a_slow_machine_plans_and_trains_as_written(tmp_path, monkeypatch):
    """With few and short steps; the four processes are on this machine, so what is slow is the links of the plan."""
    monkeypatch.chdir(tmp_path)
    page = titled("slow-machine.md")
    plan, adapt, train, status = map(shlex.split, re.findall(r"^gossamer .+$", page, re.MULTILINE))
    code, output = run(*plan[1:])
    assert code == 0 and all(re.search(rf"^\S.* {row}", output, re.MULTILINE) for row in ("uneven", "less 3")), output
    assert run(*adapt[1:])[0] == 0
    few = {"run.steps": 4, "run.local_steps": 2, "model.layers": 1, "data.seq_len": 16, "data.batch_size": 2}
    few |= {"data.source": str(TEXT), "run.threads": 1}
    code, output = run(
        *train[1:], *(word for key, value in few.items() for word in ("--set", f"{key}={value}")), "--quiet"
    )
    assert code == 0, output
    code, output = run(*status[1:])
    assert code == 0 and "4 finished" in output and all(column in output for column in ("waiting", "waits for")), output


@pytest.mark.full
def test_the_page_about_machines_that_come_and_go_works_as_written(tmp_path, monkeypatch):
    """Four processes of one machine, of which one is killed; another takes its place by the line of the page."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "configs"]) == 0
    page = (ROOT / "docs" / "how-to" / "when-a-machine-dies.md").read_text(encoding="utf-8")
    first, _, join = re.findall(r"^gossamer train .+run.elastic=true", page, re.MULTILINE)
    few = document(workers=4, run__steps=120, run__pace_s=0.1, run__timeout_s=5.0)
    Path("configs/gasloc.toml").write_text(tomli_w.dumps(few), encoding="utf-8")
    launched = Command(*shlex.split(first)[1:], "--quiet")
    processes = launched.processes(4)
    folder = Path("runs/elastic")
    deadline = time.monotonic() + 120
    while not (folder / "outcomes-002.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(processes["2"], signal.SIGKILL)
    while "gone" not in (output := run("status", folder)[1]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "gone" in output, output
    code, output = Command(*shlex.split(join)[1:], "--quiet").finish(120)
    assert code == 0, output
    code, printed = launched.finish(120)
    assert code == 0, printed
    assert "4 finished" in run("status", folder)[1]
    [replay] = re.findall(r"^gossamer simulate .*--replay.+$", page, re.MULTILINE)[:1]
    assert run(*shlex.split(replay)[1:], "--quiet")[0] == 0


README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def smaller(file: Path, **values: object) -> None:
    """Writes other values of some keys into a run file, in place of a value or of a comment that says the default."""
    text = file.read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"^(# )?{key} = [^#\n]*", f"{key} = {value} ", text, flags=re.MULTILINE)
        assert count == 1, key
    file.write_text(text, encoding="utf-8")


def test_the_commands_of_the_readme_work_as_written(tmp_path, monkeypatch):
    """With fewer steps of a smaller model; that for several machines runs in `tests/cli/test_machines.py`, on three of them.

    Only what its install brings is there, which `make demo` brings too.
    """
    monkeypatch.chdir(tmp_path)
    installs = [*re.findall(r"'\.(\[.*?\])?' ", README), *re.findall(r"--editable '?\.(\[keys\])?", MAKEFILE)[:1]]
    assert installs == ["[keys]", "[keys]"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = {re.split("[>=<[]", one)[0] for name in extras.keys() - {"keys", "dev"} for one in extras[name]}
    for module, packages in importlib.metadata.packages_distributions().items():
        if others & {one.lower() for one in packages}:
            monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        importlib.import_module("matplotlib")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["init", "configs"]) == 0
    short = {"source": f'"{TEXT}"', "seq_len": 16, "batch_size": 2}
    gasloc = Path("configs/gasloc.toml")
    gasloc.write_text(gasloc.read_text(encoding="utf-8").replace("# [data]", "[data]"), encoding="utf-8")
    smaller(gasloc, size='"0.2m"', steps=4, local_steps=2, **short)
    few = {"steps": 2, "local_steps": 1, "eval_every": 2, "eval_batches": 1, "checkpoint_every": 2, "warmup_steps": 0}
    smaller(Path("configs/demo.toml"), layers=1, **few, **short)
    (commands,) = re.findall(r"^```\n(gossamer check .*?)^```", README, re.MULTILINE | re.DOTALL)
    ran = set[str]()
    for words in (shlex.split(line, comments=True) for line in commands.splitlines()):
        if "--rank" not in words:
            assert main(words[1:]) == 0, words
            ran.add(words[1])
    assert ran == {"check", "simulate", "compare", "train", "keys", "evaluate", "probe"}
    assert Path("runs/real/model").is_dir() and Path("network.toml").is_file()


def main_of_a_user(words: list[str]) -> int:
    """`gossamer` in a process that takes itself for one that no other process of Python has started."""
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    return main(words)


def test_the_line_of_the_readme_for_several_machines_trains_and_says_what_a_score_needs(tmp_path, monkeypatch, capsys):
    """For two workers with a folder each, as on machines with disks of their own."""
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^gossamer train RUN.toml .*--rank.*$", README, re.MULTILINE)
    small = {"size": "0.2m", "layers": 1, "hidden_size": 32, "intermediate_size": 64}
    run = {"steps": 2, "local_steps": 1, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 2}
    data = {"source": str(TEXT), "seq_len": 16, "batch_size": 2}
    Path("run.toml").write_text(
        tomli_w.dumps(
            {"name": "r", "model": small, "data": data, "rule": {"name": "diloco"}, "topology": "complete", "run": run}
        ),
        encoding="utf-8",
    )
    Path("secret").write_text("0123456789abcdef" * 2, encoding="utf-8")
    Path("secret").chmod(0o600)
    given = {"RUN.toml": tmp_path / "run.toml", "HOST": f"127.0.0.1:{free_port()}", "FILE": tmp_path / "secret"}
    workers = []
    for rank in range(2):
        here = {**given, "I": rank, "N": 2, "workers=N": "workers=2", "wide": tmp_path / f"machine-{rank}" / "wide"}
        words = [str(here.get(word, word)) for word in shlex.split(line)[1:]]
        own = {"GLOO_SOCKET_IFNAME": loopback(), "OMP_NUM_THREADS": "1"}
        workers.append(Command(*words, work=main_of_a_user, **own))
    ends = [worker.finish(120) for worker in workers]
    assert [code for code, _ in ends] == [0, 0], ends
    first, second = tmp_path / "machine-0" / "wide", tmp_path / "machine-1" / "wide"
    for (_, output), folder, other in zip(ends, (first, second), (1, 0), strict=True):
        assert f"the checkpoints of worker {other} are on its machine: bring them into this folder" in output, output
        assert (
            f"HOST:{folder}/checkpoints/ {folder}/checkpoints/, then gossamer evaluate {folder} scores it" in output
        ), output
    assert main(["evaluate", str(first)]) == 2
    output = capsys.readouterr().err
    assert (
        "has checkpoints of worker 0 alone and needs those of all 2; the checkpoints of worker 1 are on its machine"
        in output
    )
    shutil.copytree(second / "checkpoints", first / "checkpoints", dirs_exist_ok=True)
    assert main(["evaluate", str(first)]) == 0
    assert "round 2: mean model" in capsys.readouterr().out


def test_the_plan_of_a_page_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "how-to" / "which-method.md").read_text(encoding="utf-8")
    ((command, shown),) = re.findall(r"^\$ gossamer (plan [^\n]+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out.splitlines()
    first, table = shown.split("...\n")[:2]
    assert first.split() == printed[0].split(), "the recommendation, in lines of the page"
    rows = [line.split() for line in table.splitlines()]
    assert rows[1][-1] == "chosen" and rows[-1][:2] == ["data", "parallel"]
    assert all(row in [line.split() for line in printed] for row in rows)


def test_relative_links_of_committed_pages_lead_to_committed_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    committed = {ROOT / name for name in listed}
    committed |= {folder for path in committed for folder in path.parents}
    assert len(committed) > 500
    for page in (path for path in committed if path.suffix == ".md"):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
            assert (page.parent / link).resolve() in committed, f"{page.relative_to(ROOT)} links to {link}"


def test_the_options_of_every_command_in_the_docs_exist():
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "adr")]
    known = {verb: set(re.findall(r"--[a-z][a-z-]*", " ".join(name for name, _ in arguments(verb)))) for verb in VERBS}
    commands = 0
    for page in pages:
        text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
        for verb, rest in re.findall(r"(?<![\w/.-])gossamer ([a-z]+)([^\n`|;&#>]*)", text):
            if verb in VERBS:
                commands += 1
                options = {*re.findall(r"(?<=\s)--[a-z][a-z-]*", rest)}
                assert options <= known[verb] | {"--help"}, f"{page.name}: gossamer {verb}{rest}"
    assert commands > 400


def test_no_command_of_the_readme_is_wider_than_its_reader_shows():
    blocks = re.findall(r"^```.*?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4 and max(len(line) for block in blocks for line in block.splitlines()) <= 95
    assert len(README.splitlines()) <= 105


def test_the_targets_of_make_that_the_readme_names_exist():
    named = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"makes"}
    assert {"demo", "test"} <= named
    for target in named:
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_python_that_is_too_old_is_named_before_an_environment_is_made(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "python3.9"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])' \"$2\"\n"
    )
    old.chmod(0o755)
    for target in ("demo", "test"):
        done = subprocess.run(
            ["make", target, f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert f"Gossamer needs Python 3.11 or newer, and {old} is 3.9; name another: make PYTHON=" in done.stderr
        assert done.returncode and not (tmp_path / ".venv").exists()


LOOPS = """
import os, sys
import torch
for path in sys.argv[1:]:
    torch.manual_seed(int(os.environ["RANK"]))
    scope = {"model": torch.nn.Linear(4, 1), "data": [torch.randn(2, 4) for _ in range(60)]}
    scope["optimizer"] = torch.optim.SGD(scope["model"].parameters(), lr=0.1)
    scope["loss"] = lambda model, batch: model(batch).square().mean()
    before = scope["model"].weight.tolist()
    exec(open(path).read(), scope)
    outer, weights = scope["outer"], scope["model"].weight.tolist()
    assert weights != before and outer.rounds == 2, outer
    os.write(1, f"{os.path.basename(path)}: {outer.n} workers, {weights}\\n".encode())
torch.distributed.init_process_group("gloo")
os.write(1, f"afterwards: {torch.distributed.get_world_size()} workers, []\\n".encode())
"""
"""The blocks of pages, in two processes, each with other parameters and data; then a process group may be made yet."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["README", "all"])
def test_the_loops_that_a_page_starts_with_torchrun_train_two_workers_as_one(every, tmp_path):
    own = (ROOT / "docs" / "how-to" / "own-loop.md").read_text(encoding="utf-8")
    loops = [code for code in python_blocks("how-to/own-loop.md") if "for batch in data:" in code]
    blocks = [*python_blocks("../README.md"), *loops]
    assert "torchrun" in README.partition(blocks[0])[0][-400:] and "torchrun" in own.partition(loops[0])[2][:80]
    assert len(blocks) == 3
    blocks = blocks if every else blocks[:1]
    files = [tmp_path / f"block-{k}.py" for k in range(len(blocks))]
    for file, code in zip(files, blocks, strict=True):
        file.write_text("import gossamer\n" + code if "import gossamer" not in code else code, encoding="utf-8")
    (tmp_path / "train.py").write_text(LOOPS, encoding="utf-8")
    outputs = [one.finish(120) for one in torchrun(2, tmp_path / "train.py", *files)]
    ends = sorted(line for _, output in outputs for line in re.findall(r"^.+?: 2 workers, .+$", output, re.MULTILINE))
    assert all(code == 0 for code, _ in outputs) and len(ends) == 2 * len(files) + 2, outputs
    assert ends[::2] == ends[1::2]


def test_every_decision_has_a_number_of_its_own():
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    numbers = [int(page.name[:4]) for page in pages]
    assert len(set(numbers)) == len(numbers), numbers
    assert [page.read_text(encoding="utf-8").splitlines()[0].partition(".")[0] for page in pages] == [
        f"# {number}" for number in numbers
    ]


def test_the_files_that_start_sites_elsewhere_parse_and_their_commands_are_commands(tmp_path):
    page = (ROOT / "docs" / "how-to" / "start-elsewhere.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "bash", "dockerfile", "yaml", "yaml"]
    scripts, words = [text for kind, text in blocks if kind == "bash"], list[list[str]]()
    for text in (yaml.safe_load(text) for kind, text in blocks if kind == "yaml"):
        if "spec" in text:
            (container,) = text["spec"]["template"]["spec"]["containers"]
            words.append(container["args"])
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert mounted <= {one["name"] for one in text["spec"]["template"]["spec"]["volumes"]}
        else:
            assert text["file_mounts"]
            scripts += [text["setup"], text["run"]]
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    together = "\n".join([*scripts, page])
    words += [
        command.replace('"', "").split()
        for command in re.findall(r"\b(?:gossamer|IMAGE) ((?:train|keys|doctor|status) [^\n>&;`#]+)", together)
    ]
    assert {one[0] for one in words} == {"train", "keys", "doctor", "status"}
    for one in words:
        app.parse_args(one, exit_on_error=False, print_error=False)
