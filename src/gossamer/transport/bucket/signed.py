"""Objects of a store that the keys of `[peers]` sign and a key of the run encrypts.

The object `key` has a random key of the run, once for each listed machine, encrypted for it alone: X25519 between a key that is
used once and the machine's own, which is that of its certificate (the map from Ed25519 to X25519 of RFC 7748), then HKDF and
ChaCha20-Poly1305. The first worker creates and signs it. Each other object is

    [Ed25519 signature, SHA-256 of the writer's certificate, salt, ciphertext]

whose ciphertext is that of the head and the body under AES-256-CTR, with a key that HKDF makes of the run's, the salt and the
name; so no two objects share a key stream. The signature covers the object `key`, the name, the writer, the salt and the
ciphertext: an object that is altered, or lies under another name or in another run's store, is refused. The name has round and
slot, and a key signs for the slots alone that `[peers]` gives to it.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from gossamer.errors import ConfigError, PeerError, TransportError, require
from gossamer.record.jsonl import json_from_peer
from gossamer.transport.bucket.bucket import MOST_HEAD_BYTES, Bucket, Item, head_and_body, item_in
from gossamer.transport.keys import Keys, certificate_fingerprint
from gossamer.transport.secret import framed

KEY_OBJECT = "key"
_SIGNATURE, _HASH = 64, hashlib.sha256().digest_size
_OF_SLOT = re.compile(r"(?:r\d{8}-from-|[tuv])(\d{5})-\d{4}")
_P = 2**255 - 19
_LOOKS = 60


class KeySeal:
    """Signs and encrypts objects as this machine, and opens those of the listed ones. See `Seal`.

    Args:
        keys: the key of this machine and the certificates of all.
        run: the SHA-256 of the object `key`.
        content_key: the key of the run.
    """

    def __init__(self, keys: Keys, run: bytes, content_key: bytes) -> None:
        self._keys, self._run, self._content_key = keys, run, content_key
        self._private, self._me = _private_key(keys), hashlib.sha256(keys.certificate).digest()
        self._listed = {hashlib.sha256(one).digest(): (one, _public_key(one)) for one in keys.certificates}

    def may_hold_slot(self, slot: int) -> bool:
        """See `Seal`."""
        return slot in self._keys.numbers(self._keys.certificate)

    trusts = may_hold_slot
    """A mean counts unchecked only where the key of this machine has closed the round."""
    proves_writers = True

    def sealed(self, name: str, head: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
        """See `Seal`."""
        salt = os.urandom(_HASH)
        cipher = self._crypt(name, salt, head_and_body(head, body))
        return b"".join((self._private.sign(self._signed(name, self._me, salt, cipher)), self._me, salt, cipher))

    def opened(self, name: str, raw: bytes) -> Item:
        """See `Seal`."""
        from cryptography.exceptions import InvalidSignature

        whole = memoryview(raw)
        signature, rest = bytes(whole[:_SIGNATURE]), whole[_SIGNATURE:]
        writer, salt, cipher = bytes(rest[:_HASH]), bytes(rest[_HASH : 2 * _HASH]), rest[2 * _HASH :]
        certificate, public = self._listed.get(writer, (None, None))
        if certificate is None or public is None:
            raise _refused(name, "nobody in the run's [peers] has signed it")
        who, numbers = self._keys.name(certificate), self._keys.numbers(certificate)
        try:
            public.verify(signature, self._signed(name, writer, salt, cipher))
        except InvalidSignature:
            raise _refused(
                name, f"it names {who}, whose signature does not fit: it was altered, or is of another name or run"
            ) from None
        slot = _OF_SLOT.match(name)
        if slot is not None and int(slot[1]) not in numbers:
            raise _refused(name, f"{who} has signed it, and may not be worker {int(slot[1])}")
        item = item_in(memoryview(self._crypt(name, salt, cipher)))
        if item is None:
            raise _refused(name, f"{who} has signed what is no object of a run")
        return item._replace(writers=numbers)

    def _signed(self, name: str, writer: bytes, salt: bytes, cipher: bytes | memoryview) -> bytes:
        return framed(b"gossamer object", self._run, name.encode(), writer, salt, hashlib.sha256(cipher).digest())

    def _crypt(self, name: str, salt: bytes, content: bytes | memoryview) -> bytes:
        """Encrypts, and decrypts."""
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        key = _derived(self._content_key, salt, b"gossamer object " + name.encode())
        return Cipher(AES256(key), CTR(bytes(16))).encryptor().update(content)


def key_seal(bucket: Bucket, keys: Keys) -> KeySeal:
    """The seal of the objects of this run; the first worker makes the key of the run.

    Raises: ConfigError, PeerError for a store whose key this machine cannot open; OSError.
    """
    require("cryptography", "keys", "a run with [peers] in a store")
    raw = bucket.get(KEY_OBJECT, MOST_HEAD_BYTES)
    if raw is None:
        made = _new_key_object(keys)
        raw = made if bucket.create(KEY_OBJECT, made) else bucket.get(KEY_OBJECT, MOST_HEAD_BYTES)
    for _ in range(_LOOKS):  # another has created it, and it may not be visible yet
        if raw is not None:
            return opened_key(keys, raw)
        time.sleep(0.5)
        raw = bucket.get(KEY_OBJECT, MOST_HEAD_BYTES)
    raise PeerError(f"the object '{KEY_OBJECT}' is in the store and cannot be read; look at the rights of this machine")


def _new_key_object(keys: Keys) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    content_key, once = os.urandom(32), X25519PrivateKey.generate()
    ephemeral = once.public_key().public_bytes_raw()
    wrapped = {
        hashlib.sha256(one).hexdigest(): _wrapping(once.exchange(_agreement_key(one)), ephemeral, one)
        .encrypt(bytes(12), content_key, None)
        .hex()
        for one in keys.certificates
    }
    text = json.dumps({"ephemeral": ephemeral.hex(), "wrapped": wrapped}).encode()
    signature = _private_key(keys).sign(framed(b"gossamer key", text))
    return b"".join((signature, hashlib.sha256(keys.certificate).digest(), text))


def opened_key(keys: Keys, raw: bytes) -> KeySeal:
    """The seal of a run from its object `key`. Raises: PeerError for one that no listed key has made for this one."""
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    signature, writer, text = raw[:_SIGNATURE], raw[_SIGNATURE : _SIGNATURE + _HASH], raw[_SIGNATURE + _HASH :]
    certificate = next((one for one in keys.certificates if hashlib.sha256(one).digest() == writer), None)
    try:
        if certificate is None:
            raise ValueError("nobody in the run's [peers] has signed it")
        _public_key(certificate).verify(signature, framed(b"gossamer key", text))
        head, me = json_from_peer(text), hashlib.sha256(keys.certificate).hexdigest()
        ephemeral = bytes.fromhex(head["ephemeral"])
        if me not in head["wrapped"]:
            raise ValueError(f"{keys.name(certificate)} has made it for a list of [peers] without this machine's key")
        seed = hashlib.sha512(_private_key(keys).private_bytes_raw()).digest()[:32]
        shared = X25519PrivateKey.from_private_bytes(seed).exchange(X25519PublicKey.from_public_bytes(ephemeral))
        wrapping = _wrapping(shared, ephemeral, keys.certificate)
        content_key = wrapping.decrypt(bytes(12), bytes.fromhex(head["wrapped"][me]), None)
    except (InvalidSignature, InvalidTag, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else "it is damaged or altered"
        raise PeerError(
            f"the object '{KEY_OBJECT}' of the store does not open ({reason}); start all with the same [peers] and an empty store"
        ) from None
    if len(content_key) != 32:
        raise PeerError(f"the object '{KEY_OBJECT}' of the store holds no key; start again with an empty store")
    return KeySeal(keys, hashlib.sha256(raw).digest(), content_key)


def _derived(key: bytes, salt: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt, info).derive(key)


def _wrapping(shared: bytes, ephemeral: bytes, certificate: bytes) -> Any:
    """The cipher for one machine's copy of the key of a run; as `shared` is used once, its nonce may be zero."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(_derived(shared, ephemeral, b"gossamer key " + hashlib.sha256(certificate).digest()))


def _private_key(keys: Keys) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(keys.path.read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"'{keys.path}' is no Ed25519 key, which a store needs; make one with gossamer keys new NAME")
    return key


def _public_key(certificate: bytes) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = x509.load_der_x509_certificate(certificate).public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise _unusable(certificate)
    return key


def _agreement_key(certificate: bytes) -> Any:
    """The X25519 key of a certificate: u = (1 + y) / (1 - y), for the y of its Ed25519 key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    y = int.from_bytes(_public_key(certificate).public_bytes_raw(), "little") & (1 << 255) - 1
    if y in (0, 1, _P - 1):  # of small order: no private key leads there
        raise _unusable(certificate)
    return X25519PublicKey.from_public_bytes(((1 + y) * pow(1 - y, -1, _P) % _P).to_bytes(32, "little"))


def _unusable(certificate: bytes) -> ConfigError:
    return ConfigError(
        f"the certificate {certificate_fingerprint(certificate)} in [peers] is of no Ed25519 key, which a store needs; make one "
        "with gossamer keys new NAME on that machine"
    )


def _refused(name: str, why: str) -> TransportError:
    return TransportError(f"the object '{name}' of the store does not count: {why}; remove it")
