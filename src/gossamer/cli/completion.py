"""`gossamer completion`: what a shell needs to complete verbs and options."""

from typing import Annotated, Literal

from cyclopts import Parameter

from gossamer.record.progress import echo

_WHERE = (
    "shell to complete in; write the output to ~/.local/share/bash-completion/completions/gossamer, to _gossamer in a folder of "
    "zsh's fpath, to ~/.config/fish/completions/gossamer.fish, or into the profile of PowerShell"
)


def command(
    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], Parameter(name="SHELL", help=_WHERE)], /
) -> None:
    """Prints a script with which a shell completes verbs and options; no file is changed."""
    from gossamer.cli import app

    echo(app.generate_completion(prog_name="gossamer", shell=shell))
