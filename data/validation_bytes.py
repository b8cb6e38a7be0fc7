"""When bits per byte of two tokenizers are comparable."""

import math

# Windows of tokens end at other bytes for another tokenizer, so the last part of a text may be missing.
RELATIVE_TOLERANCE = 0.01


def cover_same_text(num_bytes: float, other_num_bytes: float) -> bool:
    """Return whether two evaluations of one whole text covered the same bytes of it, within RELATIVE_TOLERANCE."""
    return math.isclose(num_bytes, other_num_bytes, rel_tol=RELATIVE_TOLERANCE)
