"""Exported models under lm-eval (EleutherAI's harness), in an environment of its own; lm_eval/accepted.txt has the last output.

python -m venv .lm-eval && .lm-eval/bin/pip install --constraint constraints.txt torch==2.13.0 lm-eval==0.4.13 transformers
GOSSAMER_LM_EVAL=.lm-eval/bin/python make test
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_data import write_tokenizer

import gossamer
from tiny import document

HERE = Path(__file__).parent / "lm_eval"
PYTHON = os.environ.get("GOSSAMER_LM_EVAL", "")
TEXT = [f"def f_{k}(x):\n    return x + {k}\n" for k in range(400)]
TASKS = {
    "choice": [{"question": "def f_1(x):\n    return", "choices": [" x", "\u00e9\u00e9"], "answer": 0}] * 4,
    "generate": [{"question": text, "answer": ""} for text in ("def f", TEXT[0] * 9, "x")],
    "text": [{"text": "".join(TEXT[:9])}] * 2,
}


@pytest.mark.skipif(not PYTHON, reason="needs lm-eval, in an environment that GOSSAMER_LM_EVAL names")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_exported_model_is_scored_by_all_kinds_of_tasks(tokenizer: str, tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(TEXT))
    name = "bytes" if tokenizer == "bytes" else str(write_tokenizer(tmp_path / "bpe.json", TEXT))
    settings = document(
        data__source=str(tmp_path / "text.txt"),
        data__tokenizer=name,
        run__steps=60,
        run__local_steps=6,
        record__export=True,
    )
    assert gossamer.simulate(settings, tmp_path / "run").over
    for task, rows in TASKS.items():
        shutil.copyfile(HERE / f"{task}.yaml", tmp_path / f"{task}.yaml")
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", "hf", "--model_args", "pretrained=run/model", "--include_path", ".", "--batch_size", "2"]
    words += ["--tasks", ",".join(f"gossamer_{task}" for task in TASKS), "--device", "cpu"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    ended = subprocess.run(
        [Path(PYTHON).absolute(), "-m", "lm_eval", *words],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0 and "Traceback" not in output, output
    values = {m[1]: float(m[2]) for m in re.finditer(r"\|gossamer_(\w+) *\|.*?\|[↑↓] *\|([\d.]+)", output)}
    print(f"{tokenizer}: {values}")
    assert values["choice"] == 1 and 0 < values["text"] < 8 and values.keys() == TASKS.keys(), output
