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
    """Prints a script with which a shell completes verbs and options; but for PowerShell also names, keys and run folders."""
    from gossamer.cli import app

    script = app.generate_completion(prog_name="gossamer", shell=shell)
    words = _words()
    match shell:
        case "bash":
            cases = [f"{before}) COMPREPLY=($(compgen -W '{some}' -- \"$cur\"))" for before, some in words.items()]
            script += _IN_BASH.format(cases="; return ;;\n      ".join(cases), verbs="|".join(_OF_RUNS))
        case "zsh":
            cases = [f"{before}) compadd -S '' -- {some}; return ;;" for before, some in words.items()]
            script += _IN_ZSH.format(cases="\n    ".join(cases), verbs="|".join(_OF_RUNS))
        case "fish":
            lines = [f"complete -c gossamer {_in_fish(before)} -xa '{some}'" for before, some in words.items()]
            lines += [
                f"complete -c gossamer {_in_fish(one)} -xa '(__gossamer_runs)'" for one in (*_OF_RUNS, "--resume")
            ]
            script += _IN_FISH + "\n".join(lines)
        case _:
            pass
    echo(script)


_OF_RUNS = ("status", "evaluate", "audit", "watch", "report", "price")
"""Verbs that take run folders."""

_NAMES = {f"{table}.name" for table in ("rule", "topology", "codec", "server", "pair")} | {"method"}
"""Keys that stand for a separate table, or for several."""


def _words() -> dict[str, str]:
    """What may follow an option or a verb, where nothing but Gossamer knows it."""
    from gossamer.cli.list import listed
    from gossamer.run.config.spelling import all_names

    names = {kind: " ".join(row[0] for row in rows) for kind, rows in listed().items()}
    keys = sorted({key for key in all_names().keys if "NAME" not in key} | _NAMES)
    return {
        "--set": " ".join(f"{key}=" for key in keys),
        "--method": names["methods"],
        "--codec": names["codecs"],
        "topology": names["topologies"],
        "list": " ".join(names),
    }


def _in_fish(before: str) -> str:
    """How fish says that an option, or a verb, comes before."""
    option = before.removeprefix("--")
    return f"-l {option}" if option != before else f"-n '__fish_gossamer_using_command {before}'"


_IN_BASH = """
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
    [[ "$prev" == --set ]] && compopt -o nospace 2>/dev/null  # a key is followed by its value, without a space
    case "$prev" in
      {cases}; return ;;
      --resume) COMPREPLY=($(_gossamer_runs "$cur") $(compgen -W auto -- "$cur")); return ;;
    esac
    case "$verb" in
      {verbs}) COMPREPLY=($(_gossamer_runs "$cur")) ;;
    esac
    [[ ${{#COMPREPLY[@]}} -gt 0 ]] && return
  fi
  _gossamer
}}
complete -o default -F _gossamer_values gossamer"""

_IN_ZSH = """
_gossamer_values() {{
  local -a runs=({{,runs/}}*/run.toml(N:h))
  [[ $words[CURRENT] != -* && $CURRENT -gt 2 ]] && case $words[CURRENT-1] in
    {cases}
    --resume) compadd -- $runs auto; return ;;
  esac
  # A folder elsewhere is completed as any other path.
  [[ $words[CURRENT] != -* && $CURRENT -gt 2 && $words[2] == ({verbs}) ]] && {{ compadd -- $runs || _files -/; return }}
  _cyclopts_gossamer
}}
# Sourced, it registers the function; in a folder of fpath this file is the body of the function itself.
if [[ $funcstack[1] == _gossamer ]]; then _gossamer_values "$@"; else compdef _gossamer_values gossamer; fi"""

_IN_FISH = """
function __gossamer_runs
    for one in */run.toml runs/*/run.toml
        string replace -r '/run.toml$' '' -- $one
    end
end
"""
