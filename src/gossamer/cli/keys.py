"""`gossamer keys`: the key of this machine, and the lines of it that go into a run file."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gossamer.cli.output import Json, print_json
from gossamer.errors import ConfigError
from gossamer.record.progress import echo


def command(
    action: Annotated[
        Literal["new", "show"], Parameter(name="ACTION", help="new: make a key; show: print the lines of it")
    ],
    name: str | None = None,
    /,
    *,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Makes a key for this machine, or shows the lines that every machine's run file needs to let it take part.

    Args:
        name: what the run file calls this machine; with show: the key to show (default: all of this user)
        out: the key's file (default: ~/.config/gossamer/keys/NAME.pem)
    """
    import base64

    import tomli_w

    from gossamer.transport.keys import certificate_fingerprint, certificate_of, new_key, own_keys, require_private_key

    if action == "new":
        if name is None:
            raise ConfigError("gossamer keys new got no name; give one, such as gossamer keys new berlin")
        paths = [new_key(name, out)]
    else:
        paths = [out] if out is not None else [path for path in own_keys() if name in (None, path.stem)]
        if not paths:
            raise ConfigError(
                f"there is no key{f' {name!r:.80}' if name else ''} of this user; make one with gossamer keys new "
                f"{name or 'NAME'}"
            )
    for path in paths:
        require_private_key(path)
    keys = [(name or path.stem, path, certificate_of(path)) for path in paths]
    if json:
        shown = list[dict[str, object]]()
        for named, path, raw in keys:
            certificate = {"fingerprint": certificate_fingerprint(raw), "certificate": base64.b64encode(raw).decode()}
            shown.append({"name": named, "file": path, **certificate})
        print_json({"keys": shown})
        return
    for named, path, raw in keys:
        echo(f"# the key is in {path}, and stays there; {certificate_fingerprint(raw)}")
        echo(tomli_w.dumps({"peers": {named: {"certificate": base64.b64encode(raw).decode()}}}))
    if action == "new":
        echo("# paste this into the run file of every machine, with workers = N if this machine fills several")
