"""The settings in which two workers differ although they should agree: dotted keys with their values as short texts."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_MOST_KEYS, _LONGEST_KEY, _LONGEST_VALUE, _NAMED = 1000, 120, 80, 3


def short_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings as texts to send: a long value is cut, and ends in a hash of the whole.

    >>> short_settings({"rule.lr": 0.7, "data.source": "x" * 200})
    {'rule.lr': '0.7', 'data.source': '"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx... (hash 9d9613fc)'}
    """
    return {key: _short(json.dumps(value, sort_keys=True, default=str)) for key, value in values.items()}


def _short(text: str) -> str:
    return (
        text
        if len(text) <= _LONGEST_VALUE
        else f"{text[:40]}... (hash {hashlib.sha256(text.encode()).hexdigest()[:8]})"
    )


def read_settings(value: Any) -> dict[str, str] | None:
    """The settings that another worker sent, printable and within bounds; None for anything else.

    >>> read_settings({"rule.lr": "0.7"}), read_settings({"rule.lr": 0.7}), read_settings([])
    ({'rule.lr': '0.7'}, None, None)
    """
    if not isinstance(value, dict) or len(value) > _MOST_KEYS:
        return None
    texts = [(key, one) for key, one in value.items() if isinstance(key, str) and isinstance(one, str)]
    fit = all(
        len(key) <= _LONGEST_KEY and len(one) <= _LONGEST_VALUE and (key + one).isprintable() for key, one in texts
    )
    return dict(texts) if fit and len(texts) == len(value) else None


def difference(name: str, settings: Mapping[str, str], other: str, others: Mapping[str, str]) -> str:
    """The keys in which two workers differ, at most three with their values; empty if none.

    >>> difference("worker 2", {"rule.lr": "0.7", "seed": "1"}, "worker 0", {"rule.lr": "0.5", "seed": "1"})
    'worker 2 has rule.lr = 0.7 and worker 0 has 0.5'
    """
    keys = sorted(key for key in settings.keys() | others.keys() if settings.get(key) != others.get(key))
    words = []
    for key in keys[:_NAMED]:
        first, second = settings.get(key), others.get(key)
        has = f"{name} has no {key}" if first is None else f"{name} has {key} = {first}"
        words.append(f"{has} and {other} has {'none' if second is None else second}")
    more = len(keys) - _NAMED
    return ", ".join(words) + (f", and {more} more key{'s' * (more > 1)} differ{'s' * (more == 1)}" if more > 0 else "")
