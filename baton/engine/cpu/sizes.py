"""Sizes rounded up to a few, so that they come back."""


def rounded_up(count: int, steps: int = 8) -> int:
    """The least of the allowed sizes that holds `count`; there are `steps` from each power of two to the next.

    oneDNN compiles code for every size that it meets and keeps it: up to a millisecond and a third of a MiB for each matrix. Computing a
    few more rows costs less.
    """
    step = max(1, (1 << (count - 1).bit_length()) // (2 * steps))
    return -(-count // step) * step
