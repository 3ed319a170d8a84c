"""Sizes that come back."""


def rounded_up(count: int, steps: int = 8) -> int:
    """At least `count`: one of `steps` sizes from each power of two to the next.

    oneDNN compiles code for every size that it meets and keeps it: up to a millisecond and a third of a MiB, for each matrix. To compute a
    few rows more costs less.
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step
