"""The level at which each idea of a chain is tested.

By default LORD++ controls the false discovery rate: the expected fraction of accepted ideas that are not better
(Ramdas et al., "Online control of the false discovery rate with decaying memory", 2017). A chain begins with a wealth;
each test spends a part of it, and each discovery adds to it. In strict mode nothing is added: this controls the
probability of any false acceptance. tests/tools/research/test_online_fdr.py simulates both, with the sequential test
and shared baselines that the chain uses.

An idea that is under test counts as one without a discovery (Zrnic et al., "Asynchronous online testing of multiple
hypotheses", 2021), so several may be tested at once.
"""

from collections.abc import Sequence

from scipy.special import zeta

RATE = 0.05  # bound on the false discovery rate, or on the probability of any false acceptance
DECAY = 1.3  # exponent by which levels decay with the number of tests since a gain of wealth


def fraction(number: int) -> float:
    """Return the fraction of a wealth that test `number` (1, 2, ...) after its gain spends; all sum to 1."""
    return float(number**-DECAY / zeta(DECAY))


def gains(discoveries: Sequence[int], strict: bool) -> list[tuple[int, float]]:
    """Return the gains of wealth as (number of tests before it, gain), the initial wealth first."""
    if strict:
        return [(0, RATE)]
    # LORD++: half of the rate at the start, the other half at the first discovery, the rate at each later one.
    sizes = [RATE / 2, RATE / 2, *(RATE for _ in discoveries[1:])]
    return [*zip([0, *discoveries], sizes, strict=False)]


def next_level(num_tests: int, discoveries: Sequence[int], strict: bool = False) -> float:
    """Return the one-sided level of the next test.

    `discoveries` has the number of tests that had begun when each discovery was made, in order.
    """
    return sum(gain * fraction(num_tests + 1 - before) for before, gain in gains(discoveries, strict))


def wealth(levels: Sequence[float], discoveries: Sequence[int], strict: bool = False) -> float:
    """Return the wealth that is left after tests at these levels."""
    return sum(gain for _, gain in gains(discoveries, strict)) - sum(levels)
