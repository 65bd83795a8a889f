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
    """Prints a script with which a shell completes verbs and options; in bash also methods, topologies, keys and run folders."""
    from gossamer.cli import app

    script = app.generate_completion(prog_name="gossamer", shell=shell)
    echo(f"{script}\n{_values_in_bash()}" if shell == "bash" else script)


_IN_BASH = """\
# Values: names of methods and topologies, keys of run files, and run folders, which nothing but Gossamer knows.
_gossamer_runs() {{
  local one
  for one in "$1"*/ runs/"$1"*/; do
    [[ -e "${{one}}run.toml" ]] && printf '%s\\n' "${{one%/}}"
  done
}}
_gossamer_values() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  COMPREPLY=()
  if [[ "$cur" != -* && $COMP_CWORD -gt 1 ]]; then
    case "$prev" in
      --set) COMPREPLY=($(compgen -S = -W '{keys}' -- "$cur")); compopt -o nospace 2>/dev/null; return ;;
      --method) COMPREPLY=($(compgen -W '{methods}' -- "$cur")); return ;;
      --codec) COMPREPLY=($(compgen -W '{codecs}' -- "$cur")); return ;;
      --resume) COMPREPLY=($(_gossamer_runs "$cur") $(compgen -W auto -- "$cur")); return ;;
      topology) COMPREPLY=($(compgen -W '{topologies}' -- "$cur")); return ;;
      list) COMPREPLY=($(compgen -W '{kinds}' -- "$cur")); return ;;
    esac
    case "$verb" in
      status|evaluate|audit|watch|report|price) COMPREPLY=($(_gossamer_runs "$cur")) ;;
    esac
    [[ ${{#COMPREPLY[@]}} -gt 0 ]] && return
  fi
  _gossamer
}}
complete -o default -F _gossamer_values gossamer
"""


_NAMES = {f"{table}.name" for table in ("rule", "topology", "codec", "server", "pair")}
"""Keys that stand for a separate table."""


def _values_in_bash() -> str:
    """The bash code that completes values, around the script that completes verbs and options."""
    from gossamer.cli.list import listed
    from gossamer.run.config.run_file import RunConfig
    from gossamer.settings.schema import keys_of

    names = {kind: " ".join(row[0] for row in rows) for kind, rows in listed().items()}
    return _IN_BASH.format(
        keys=" ".join(sorted({key for key in keys_of(RunConfig) if "NAME" not in key} | _NAMES)),
        methods=names["methods"],
        codecs=names["codecs"],
        topologies=names["topologies"],
        kinds=" ".join(names),
    )
