"""`gossamer completion`: what a shell needs to complete verbs and options."""

from typing import Annotated, Literal

from cyclopts import Parameter

__all__ = ["command"]


def command(shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], Parameter(name="SHELL")], /) -> None:
    """Prints a script with which a shell completes verbs and options. No file is changed; put it where the shell looks:

        gossamer completion bash > ~/.local/share/bash-completion/completions/gossamer
        gossamer completion zsh > ~/.zsh/completions/_gossamer
        gossamer completion fish > ~/.config/fish/completions/gossamer.fish

    Args:
        shell: bash, zsh, fish or powershell
    """
    from gossamer.cli import app

    print(app.generate_completion(prog_name="gossamer", shell=shell))
