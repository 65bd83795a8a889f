"""Messages through a codec: what no codec can send is refused by name."""

import pytest
import torch

from gossamer.codecs import CODECS, make_codec
from gossamer.codecs.message import encode
from gossamer.errors import ConfigError


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_that_loses_anything_refuses_complex_numbers_of_which_it_would_send_the_real_parts(name: str) -> None:
    codec, message = make_codec(name), (torch.ones(256), torch.ones(256, dtype=torch.complex64))
    if codec.exact:
        assert encode(codec, message, 0)[1].dtype == torch.complex64
        return
    with pytest.raises(ConfigError, match=rf"'{name}' got a message in torch.complex64"):
        encode(codec, message, 0)
