"""`gossamer evaluate`: the mean model of a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.cli.run_file_options import parts_of_folder
from gossamer.errors import ConfigError
from gossamer.record.progress import echo


def command(
    folder: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    round: int | None = None,
    source: str | None = None,
    push: Annotated[str | None, Parameter(metavar="USER/NAME")] = None,
    public: bool = False,
    allow_code: bool = False,
    json: Json = False,
) -> None:
    """Forms the mean model of a run from the checkpoints of one round, scores it and exports it.

    Args:
        folder: run folder
        round: number of finished rounds (default: the newest that all workers have; of an elastic run, most)
        source: evaluate on another text, as data.source has it: whole files, up to a million tokens of them; writes nothing
        push: upload the model to the Hugging Face Hub, where only its owner sees it; writes a model card
        public: let everybody see what is pushed
        allow_code: import the Python code that the run names though the folder is from elsewhere, or it has changed since
    """
    from gossamer.run.config.document import load_run

    if source is not None and push is not None:
        raise ConfigError(
            f"--source {source} was given, with which no model is written, and --push {push}; leave one of them out"
        )
    if public and push is None:
        raise ConfigError(
            f"--public is {public} and --push was not given, so nothing is uploaded; add --push USER/NAME"
        )
    document = load_run(folder)  # a folder without a run is refused before torch is imported
    from gossamer.models.export import push_to_hub
    from gossamer.report.table import number_text
    from gossamer.run.bookkeeping.evaluate import UNUSED, evaluate
    from gossamer.run.bookkeeping.inputs import changed_code
    from gossamer.run.config.resolve import settings_of
    from gossamer.run.config.run_file import parse

    config = parse(document)
    parts = parts_of_folder(config, folder, "evaluate", allowed=allow_code, without=UNUSED)
    round, result, workers = evaluate(folder, round, parts, source, allow_code=allow_code)
    is_changed = changed_code(settings_of(config), folder, "evaluate", without=UNUSED, allowed=True, speaks=False)
    model = folder / "model" if source is None and not is_changed else None
    if push is not None and model is None:
        raise ConfigError(
            f"the code of '{folder}' has changed, so that no model was written for --push {push}; restore the code"
        )
    address = push_to_hub(folder / "model", push, private=not public) if push is not None else None
    if json:
        facts = {"folder": folder, "round": round, "workers": workers, **result._asdict(), "model": model}
        print_json({**facts, "pushed": address})
        return
    worst = f"worst worker {number_text(max(result.worker_losses), '.4f')}, " if result.worker_losses else ""
    echo(
        f"round {round}: mean model {number_text(result.loss, '.4f')} nats, {worst}disagreement {result.disagreement:.3g}"
    )
    if model is not None:
        echo(f"mean model: {model}")
    if address is not None:
        echo(f"pushed: {address}")
