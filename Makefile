# Everything runs inside .venv, which the first target that needs it makes.

PYTHON ?= python3
BIN := .venv/bin
PROCESSES ?= 4  # for two cores: tests wait for disks, timeouts and each other, and each process collects for four seconds

export PYTHONDONTWRITEBYTECODE :=  # tests start many processes, each of which would compile the package anew

.PHONY: help demo test types tests parity full bench chaos survival injuries fuzz methods results pictures docs release titan gpu gpu-runs

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile | expand -t 10

demo: .venv/.demo  ## compare the methods on a small model, and write one report
	$(BIN)/gossamer demo --resume  # a second call continues, or shows the finished runs

test: .venv/.installed  ## lint, format, types, tests and doctests: what CI runs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(MAKE) --jobs 2 types tests

types: .venv/.installed
	$(BIN)/pyright

tests: .venv/.installed
	$(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --hypothesis-profile=repeatable --randomly-seed=27

ALL := $(BIN)/pytest --full

parity: .venv/.installed  ## simulator against real processes, bit for bit, over every allowed pairing; an hour or two
	$(ALL) tests/run/synchronous/test_parity.py

full: .venv/.installed  ## every test, with all that CI leaves out or samples; hours; ON=PATH: a part
	$(ALL) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ON)

bench: .venv/.installed  ## the benchmarks, as ratios against a limit or a peer; writes docs/results/benchmarks.md; an hour
	$(BIN)/python benchmarks/bench.py

GPU ?= $(BIN)/python
ON_GPU := test_gpu.py $(addprefix run/,asynchronous elastic experiments replay served simulated synchronous worker) library optimizers/test_averaging.py models/test_fomoe.py integrations
gpu:  ## what needs a GPU, and runs of every kind on one, simulated and real, bit for bit; GPU is a Python with a torch for CUDA and what tests need
	GOSSAMER_TEST_DEVICE=cuda PYTHONPATH=src $(GPU) -m pytest --numprocesses $(PROCESSES) --dist loadfile $(ON_GPU:%=tests/%)

gpu-runs:  ## what is left of five runs at 35M parameters, for nine minutes of a GPU
	PYTHONPATH=src $(GPU) benchmarks/first_published.py

chaos: .venv/.installed  ## kill, stop and cut off workers of elastic runs; an hour or two, partitions need root; writes docs/results/chaos.md
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/pytest tests/transport/test_bucket_protocol.py tests/transport/test_bucket_server.py tests/run/elastic/test_store_runs.py tests/run/served/test_served_in_store.py --full

injuries: .venv/.installed  ## hurt a thousand run folders and try every verb on each; two hours; writes docs/results/injuries.md
	$(BIN)/python tests/injuries.py --page docs/results/injuries.md

fuzz: .venv/.installed  ## give spoilt bytes to all that decodes any; an hour, and a call goes on from the last; writes docs/results/fuzz.md
	$(BIN)/python tests/fuzz.py

survival: .venv/.installed  ## goodput under failures, replaced workers, elastic runs in calm; two hours on two idle cores; writes docs/results/survival.md, churn.md and calm.md
	$(BIN)/python benchmarks/survival.py --seeds 3
	$(BIN)/python benchmarks/churn.py
	$(BIN)/python benchmarks/calm.py

TITAN ?= .titan/bin/python
titan:  ## unmodified torchtitan jobs as sites, in an environment of its own: TITAN is a Python with torch, torchtitan 0.3.0 and triton
	PYTHONPATH=src $(TITAN) tests/titan/accept.py | tee tests/titan/accepted.txt

methods: .venv/.installed  ## write docs/methods.md, what gossamer list prints, and the names of run files, from the code
	PYTHONPATH=docs $(BIN)/python -m generators.methods_table > docs/methods.md
	mkdir -p build
	$(BIN)/python -c 'import json; from gossamer.cli.list import from_code; print(json.dumps(from_code(), indent=0, ensure_ascii=False))' > build/list.json
	mv build/list.json src/gossamer/cli/list.json  # not at once: an error would leave an empty one
	$(BIN)/python -c 'import json; from gossamer.run.config.spelling import from_code; print(json.dumps(from_code()._asdict(), indent=0, ensure_ascii=False))' > build/names.json
	mv build/names.json src/gossamer/run/config/names.json

results: .venv/.installed  ## write what is computed (docs/results/utilisation.md, goodput.md), and pages and numbers from committed outcomes
	$(BIN)/python benchmarks/bench.py --page
	$(BIN)/python benchmarks/utilisation.py
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python docs/fill.py

pictures: .venv/.installed  ## write the pictures of the docs from a run that it trains: docs/pictures
	$(BIN)/python benchmarks/pictures.py

docs: .venv/.installed  ## build the site strictly into site/
	$(BIN)/python docs/generate.py build/docs
	PYTHONPATH=docs NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file build/docs/mkdocs.yml --site-dir $(CURDIR)/site

release: .venv/.installed  ## build and check what would be published, in an environment of its own; publishing is left to a person
	rm -rf dist build/release
	$(BIN)/hatchling build
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --no-compile --constraint constraints.txt torch dist/*.whl
	cd build/release && bin/gossamer init configs && bin/gossamer check configs/gasloc.toml
	cd build/release && timeout 60 bin/gossamer demo || test $$? -eq 124  # its first minute
	grep -q "^## \[$$($(BIN)/gossamer --version)\] - 20" CHANGELOG.md || { echo "name the release and its day in CHANGELOG.md, as in: ## [1.0.0] - 2027-01-31"; exit 1; }
	git tag --annotate "v$$($(BIN)/gossamer --version)" --message "Gossamer $$($(BIN)/gossamer --version)"
	@echo 'left for a person: push the tag, and upload dist/ with twine'

# An old Python ends here, before there is an environment; one that an old Python has made is made again.
VENV = $(PYTHON) -c '$(NEW_ENOUGH)' && { $(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null || $(PYTHON) -m venv --clear .venv; }
NEW_ENOUGH := import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Gossamer needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12")

# The build without CUDA, unless there is a GPU, a system whose builds have none, or an index of packages that somebody has chosen.
TORCH = torch $$(test "$$(uname)" != Linux || test -e /dev/nvidiactl || env | grep -q "^PIP_.*\(INDEX\|LINKS\)" || \
	$(BIN)/pip config list | grep -q "index\|find-links" || echo --index-url https://download.pytorch.org/whl/cpu)

# What README installs: what the demo needs, and keys; pip shows how far it is.
.venv/.demo: pyproject.toml constraints.txt
	@$(VENV)
	test -e .venv/.installed || $(BIN)/pip install --no-compile --constraint constraints.txt $(TORCH)
	test -e .venv/.installed || $(BIN)/pip install --no-compile --constraint constraints.txt --editable '.[keys]'
	touch $@

# torch comes first and on its own, so that the build pip is configured for (CPU or CUDA) is settled before anything asks for it.
# Python compiles the few modules that are used when it first imports them: pip would compile all, on one core, for a minute.
.venv/.installed: pyproject.toml constraints.txt
	@$(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'import gossamer.cli.train, torch._dynamo, transformers'
	touch $@
