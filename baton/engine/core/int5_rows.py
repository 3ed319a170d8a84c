"""How keys and values lie in memory as int5: what a head has for one token is a row, with one scale, a bfloat16, which lies elsewhere.

A number is `level · scale`, its level -16 to 15 in two's complement. A row `[D]` has 20 bytes for each group of 32 neighbours: the lower
half of byte i is the lower four bits of level i, the higher half those of level 16 + i; in the 4 bytes behind them, bit i is the fifth one
of level i. What a row lacks of a whole group is zero. (Q5_0 of llama.cpp, whose groups have a scale each. Here the numbers of a row are
turned before: `baton.engine.model.ops.Ops.turn_`.)
"""

GROUP = 32  # numbers
LEVELS = 16  # below zero; above, one less
NIBBLE_BYTES = GROUP // 2  # of a group
GROUP_BYTES = NIBBLE_BYTES + GROUP // 8


def groups_of(dim: int) -> int:
    """How many groups a row of so many numbers has."""
    return -(-dim // GROUP)


def row_bytes(dim: int) -> int:
    """5 bits a number, of whole groups."""
    return groups_of(dim) * GROUP_BYTES
