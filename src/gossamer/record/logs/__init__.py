"""Logs of a run folder: actions, their times, and the events that decided results."""

__all__: list[str] = []
