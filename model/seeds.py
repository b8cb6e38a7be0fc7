"""Seeds of random streams, and the mixing of bits behind permutations and digests."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a function of `parts`, so that each named stream is independent of the others.

    It is the same on every machine and Python version, unlike `hash`.
    """
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


def mix_bits(x):
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014), a permutation that spreads every bit over all.

    Args:
        x: int64 NumPy array or torch tensor, taken as 64-bit patterns. It is signed because torch has no arithmetic on
            uint64; the masks turn arithmetic shifts into logical ones, and products wrap around.

    Returns:
        The same type as `x`.
    """
    x = (x ^ (x >> 30 & 2**34 - 1)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ (x >> 27 & 2**37 - 1)) * (0x94D049BB133111EB - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)
