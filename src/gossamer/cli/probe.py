"""`gossamer probe`: the links between workers, measured."""

from pathlib import Path

from gossamer.errors import ConfigError

__all__ = ["command"]


def command(*, out: Path, local: int | None = None, max_bytes: int = 1 << 24, test_s: float = 0.5) -> int:
    """Measures the links between workers, and writes them as a network file.

    Args:
        out: network file to write (TOML)
        local: start this many worker processes on this machine
        max_bytes: largest message (default: 16 MiB)
        test_s: seconds after which a message is long enough (default: 0.5)
    """
    if out.exists():
        raise ConfigError(f"'{out}' already exists; name another file with --out, or remove it")
    if local is not None:
        from gossamer.cli import main
        from gossamer.cli.train import import_early
        from gossamer.transport.local import run_local

        if local < 2:
            raise ConfigError(f"--local {local} was given but a link has two ends; start at least 2 workers")
        import_early()
        words = ["--out", str(out), "--max-bytes", str(max_bytes), "--test-s", str(test_s)]
        return run_local(local, main, ["probe", *words])
    from gossamer.network.links import to_toml
    from gossamer.network.probe import probe
    from gossamer.record.files import atomic_write

    network = probe(max_bytes=max_bytes, test_s=test_s)
    if network is not None:
        atomic_write(out, to_toml(network).encode())
        print(f"network file: {out}")
    return 0
