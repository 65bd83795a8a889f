"""The messages of an asynchronous worker, as its peers decode them and as bytes."""

import torch
from torch import Tensor

from gossamer import rng
from gossamer.codecs import Codec, fitted
from gossamer.codecs.message import decode, decode_received, encode, payload_like
from gossamer.errors import TransportError
from gossamer.finite import must_be_finite
from gossamer.layout import Layout
from gossamer.transport import wire
from gossamer.tree import Tree, leaves, nbytes, refill


class MessageForm:
    """Encodes and decodes messages of fixed shapes and dtypes.

    Args:
        like: any message.
        worker: whose messages `pack` packs.
    """

    def __init__(
        self, codec: Codec, layout: Layout, like: Tree, *, seed: int, worker: int, device: torch.device
    ) -> None:
        self._codec, self._seed, self._worker, self._device = fitted(codec, layout), seed, worker, device
        self._like = like
        self._payload = payload_like(self._codec, like)
        self.bytes = nbytes(self._payload)
        """The size of a payload."""
        self.wire_bytes = wire.frames_bytes(leaves(self._payload))

    def pack(self, message: Tree, number: int, fragment: int = 0) -> tuple[Tree, Tensor]:
        """A message as the others decode it, as in `LoopOptions.transmit`, and its bytes. Raises: TrainingError."""
        name = f"the message of worker {self._worker} in its phase {number}"
        must_be_finite({name: message})
        payload = encode(self._codec, message, rng.key(self._seed, self._worker, number, fragment, "codec"))
        packed = wire.on_host(wire.pack_frames(leaves(payload)))
        if self._codec.exact:
            return message, packed
        decoded = decode(self._codec, payload, message)
        must_be_finite({f"{name}, decoded,": decoded})
        return decoded, packed

    def unpack(self, packed: Tensor, sender: int) -> Tree:
        """The message of another worker. Raises: TransportError for one that no honest worker sends."""
        frames = wire.unpack_frames(packed.to(self._device), leaves(self._payload))
        try:
            return decode_received(self._codec, refill(self._payload, frames), self._like)
        except TransportError as error:
            raise TransportError(f"what worker {sender} sent is no message: {error}") from None

    def is_sound(self, packed: Tensor, sender: int) -> bool:
        """Whether it is a valid message of another worker."""
        try:
            self.unpack(packed, sender)
        except TransportError:
            return False
        return True
