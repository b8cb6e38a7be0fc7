"""Seeds of what is drawn at random: each stream of numbers has its own name, and none moves another."""

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a function of `parts`: independent streams of random numbers, each with its own name.

    The same on every machine and Python version, unlike `hash`.
    """
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1
