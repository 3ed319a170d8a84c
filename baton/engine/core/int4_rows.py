"""How keys and values lie in memory as int4: what a head has for one token is a row, in groups of neighbours with a scale and a shift each.

A number is `level · scale + shift`, its level 0 to 15. A row `[D]` begins with the levels, 16 bytes for each group of 32: the lower half of
byte i of a group is its level i, the higher half its level 16 + i. The groups' factors follow, 4 bytes each: the shift and then the scale,
both bfloat16. What a row lacks of a whole group is levels of zero. (Groups with a scale and a smallest number: Q4_1 of llama.cpp.)
"""

GROUP = 32  # numbers
LEVELS = 15  # the greatest
LEVEL_BYTES = GROUP // 2  # of a group
FACTOR_BYTES = 4  # of a group


def groups_of(dim: int) -> int:
    """Of a row of so many numbers."""
    return -(-dim // GROUP)


def row_bytes(dim: int) -> int:
    """5 bits a number, of whole groups."""
    return groups_of(dim) * (LEVEL_BYTES + FACTOR_BYTES)
