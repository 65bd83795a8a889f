"""The compiled passes: the bits of the plain form, for every codec and every number, or the plain form itself."""

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from codecs_in_use import VARIANTS
from gossamer.codecs import Codec, int8, passes, topk
from gossamer.codecs.passes import Passes, compile_to
from gossamer.tree import leaves

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    1e-45,
    -1e-45,
    1.1754942e-38,
    3.3e38,
    3.4e38,
    2**-6,
    -(2**-7),
    1 / 254,
    1 / 14,
)
LENGTHS = (1, 7, 8, 9, 63, 255, 1024, 4097, 3 * 4096 + 5, (1 << 16) + 4099)
compiler = shutil.which("cc") or ""
needs_compiler = pytest.mark.skipif(not compiler, reason="no C compiler here")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    passes._compiled.cache_clear()  # pyright: ignore[reportPrivateUsage]


def hard() -> Iterator[Tensor]:
    """Gaussian numbers, ties, halves of steps, zeros, and blocks with special values, NaN of both signs and infinities."""
    generator = torch.Generator().manual_seed(3)
    for numel in LENGTHS:
        x = torch.randn(numel, generator=generator)
        yield x
        yield torch.randint(-3, 4, (numel,), generator=generator) / 2
        yield torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (numel,), generator=generator)]
        yield x * torch.exp(torch.randn(numel, generator=generator) * 20)
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            one = x.clone()
            one[torch.randint(0, numel, (2,), generator=generator)] = value
            yield one
    yield torch.zeros(4096)
    yield torch.full((5000,), -math.nan)
    yield torch.randn(2 * 5000, generator=generator)[::2]


def bits(codec: Codec, x: Tensor) -> list[bytes]:
    """The bytes of the payload, and of what is decoded from it."""
    payload = codec.encode(x, 7)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (*leaves(payload), codec.decode(payload, x))]


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.parametrize("codec", [pytest.param(codec, id=name) for name, codec in VARIANTS.items()])
def test_compiled_passes_and_the_plain_form_have_the_same_bits(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for x in hard():
        monkeypatch.setattr(passes, "LONG", sys.maxsize)
        plain = bits(codec, x)
        monkeypatch.setattr(passes, "LONG", 0)
        assert bits(codec, x) == plain, x


@pytest.mark.sampled(1)
@needs_compiler
@pytest.mark.parametrize(
    "flags", [("-DONE_TARGET",), ("-DONE_TARGET", "-march=x86-64-v3"), ("-DONE_TARGET", "-O0")], ids=" ".join
)
def test_passes_compiled_for_another_processor_have_the_same_bits(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "-march=x86-64-v3" in flags and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    compile_to(tmp_path / "other.so", compiler, *flags)
    monkeypatch.setattr(passes, "LONG", 0)
    names = ("int8", "int4", "fp4", "sign", "topk", "topk odd", "int8 stochastic", "int4 stochastic", "fp4 stochastic")
    rows = [VARIANTS[name] for name in names]
    native = [bits(codec, x) for codec in rows for x in hard()]
    monkeypatch.setattr(passes, "_compiled", lambda: Passes(tmp_path / "other.so"))
    monkeypatch.setattr(passes._compiled, "cache_clear", lambda: None, raising=False)  # pyright: ignore[reportPrivateUsage]
    assert [bits(codec, x) for codec in rows for x in hard()] == native


@pytest.mark.full
@needs_compiler
def test_passes_are_compiled_once_and_kept_where_no_other_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, warnings = torch.randn(passes.LONG), []
    for mode in (None, None, 0o777):
        passes._compiled.cache_clear()  # pyright: ignore[reportPrivateUsage]
        if mode is not None:
            (tmp_path / "gossamer").chmod(mode)
        caplog.clear()
        with caplog.at_level("INFO"):
            int8().encode(x, 0)
        warnings.append("compiled the codecs" in caplog.text)
    assert warnings == [True, False, True], "what others may have written is not loaded"
    assert len([*(tmp_path / "gossamer").iterdir()]) == 1


@pytest.mark.parametrize("script", [None, "echo no; exit 1"], ids=["no compiler", "one that fails"])
def test_without_a_compiler_codecs_take_the_plain_form_and_say_so_once(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if script is not None:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    passes._compiled.cache_clear()  # pyright: ignore[reportPrivateUsage]
    x = torch.randn(passes.LONG)
    found = [bits(codec, x) for codec in (int8(), topk(), int8())]
    assert found[0] == found[2] and caplog.text.count("several times slower") == 1


@needs_compiler
def test_a_payload_of_another_size_is_never_read_by_compiled_code() -> None:
    x = torch.randn(1 << 16)
    payload = int8().encode(x, 0)
    with pytest.raises(RuntimeError):
        int8().decode(payload._replace(scales=payload.scales[:3]), x)
