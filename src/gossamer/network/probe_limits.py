"""The bounds of what `gossamer probe` sends, which a command checks before it starts any process."""

from typing import Annotated

from pydantic import Field

SMALLEST_BYTES = 1 << 14
"""The size of the first message of a test."""
LargestMessage = Annotated[int, Field(ge=SMALLEST_BYTES, le=1 << 30)]
"""Bytes of the largest message of a test."""
LongEnough = Annotated[float, Field(gt=0, le=60)]
"""Seconds after which a message is long enough."""
