"""Rounds sizes up to a few, so that the same sizes recur."""


def rounded_up(count: int, steps: int = 8) -> int:
    """The smallest allowed size that is at least `count`; there are `steps` sizes from each power of two to the next.

    oneDNN compiles code for every size that it meets and keeps it: up to a millisecond and a third of a MiB for each matrix. Computing a
    few more rows costs less.
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step
