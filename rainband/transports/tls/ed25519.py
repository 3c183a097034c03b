"""Ed25519 signatures (RFC 8032), for the certificate that a run signs itself.

Python's standard library can use certificates, and cannot make them. Only the run's own machine calls this, twice per
run, so it need neither be fast nor take the same time for all keys; OpenSSL uses the key in connections.
"""

from __future__ import annotations

import hashlib

KEY_BYTES = 32

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_1 = pow(2, (_P - 1) // 4, _P)

# A point (x, y) of the curve as (X, Y, Z, T) with x = X/Z, y = Y/Z, x*y = T/Z.
_Point = tuple[int, int, int, int]


def public_key(seed: bytes) -> bytes:
    """Return the public key of a private key, which is 32 random bytes."""
    return _encoded(_multiplied(_scalar(seed), _BASE))


def sign(seed: bytes, message: bytes) -> bytes:
    """Return the signature of a message, 64 bytes."""
    prefix = hashlib.sha512(seed).digest()[KEY_BYTES:]
    nonce = _number(hashlib.sha512(prefix + message).digest()) % _ORDER
    commitment = _encoded(_multiplied(nonce, _BASE))
    challenge = _number(hashlib.sha512(commitment + public_key(seed) + message).digest()) % _ORDER
    return commitment + ((nonce + challenge * _scalar(seed)) % _ORDER).to_bytes(KEY_BYTES, "little")


def _scalar(seed: bytes) -> int:
    """Return the secret number of a private key: the lower half of its hash, with some bits fixed."""
    assert len(seed) == KEY_BYTES, f"a private key has {KEY_BYTES} bytes, not {len(seed)}"
    lower = _number(hashlib.sha512(seed).digest()[:KEY_BYTES])
    return lower & ((1 << 254) - 8) | (1 << 254)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _added(a: _Point, b: _Point) -> _Point:
    low, high = (a[1] - a[0]) * (b[1] - b[0]) % _P, (a[1] + a[0]) * (b[1] + b[0]) % _P
    products, scales = 2 * a[3] * b[3] * _D % _P, 2 * a[2] * b[2] % _P
    e, f, g, h = high - low, scales - products, scales + products, high + low
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiplied(factor: int, point: _Point) -> _Point:
    total = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = _added(total, point)
        point = _added(point, point)
        factor >>= 1
    return total


def _encoded(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(KEY_BYTES, "little")


def _base_point() -> _Point:
    """Return the point with y = 4/5 and an even x."""
    y = 4 * pow(5, -1, _P) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT_OF_MINUS_1 % _P
    if x & 1:
        x = _P - x
    return x, y, 1, x * y % _P


_BASE = _base_point()
