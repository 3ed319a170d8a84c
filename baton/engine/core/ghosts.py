"""Whether blocks that leave the pool come back, told by their keys alone: tiers keep blocks while they do. Pure.

A *ghost* is the key of a block that has left the pool, whether or not a tier has its KV (the lists A1out of 2Q, Johnson and Shasha, VLDB
1994, and B1 and B2 of ARC, Megiddo and Modha, FAST 2003). A prompt that needs the block of a ghost, or one that a tier holds, shows that
blocks return. `left` and `asked` move one number, the balance. It begins at the reach; a block that left takes one from it, and a block
that came back adds KEEPS, up to the reach. The tiers keep blocks while there is a balance. So

  * what is useless is kept for one turnover of pool and tiers, and from then on for nothing;
  * as long as one block in KEEPS comes back, everything is kept; if fewer do, KEEPS for each of them;
  * who comes back late is seen, though nothing was kept: the first is computed, and the next ones find their blocks.

Where more blocks fit the tiers than MOST, one key in 2, 4, … 256 is looked at, which its first bits choose, and stands for as many (SHARDS,
Waldspurger and others, FAST 2015): keys are hashes, and every worker chooses the same.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable

# Keeping a block takes 1/16 of the time of computing it with the smallest model (benchmarks/tiers.py), and less with a larger one: so what
# is kept costs at most twice what it saves there, and what is not would have saved 1 / (4 * KEEPS) of all computing at most.
KEEPS = 32
MOST = 1 << 15  # keys, some 5 MB
PATIENCE_S = 300.0  # of work without a return, and a turnover of the pool: the tiers may be too large for a turnover ever to end
GAP_S = 1.0  # a longer time between two blocks that leave is no work


class Ghosts:
    def __init__(self, pool: int, tiers: int) -> None:
        """Blocks that have room in each."""
        self.reach = pool + tiers
        self._pool = pool
        self.every = 1
        while self.reach > self.every * MOST and self.every < 256:
            self.every *= 2
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # that left last, the oldest first
        self._most = min(MOST, self.reach // self.every)
        self._balance = self.reach
        self._since = 0  # blocks that left since one came back
        self._work_s = 0.0  # in this time
        self._last = 0.0  # when one left
        self.left_blocks = 0
        self.returned = 0  # blocks

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def open(self) -> bool:
        """Whether what leaves the pool is worth keeping."""
        return self._balance > 0

    @property
    def why(self) -> str:
        """What the decision comes from."""
        if self.returned == 0:
            return f"none of {self.left_blocks} blocks that left the pool has come back"
        return f"{self.returned} of {self.left_blocks} blocks that left the pool have come back, none of the last {self._since}"

    def left(self, keys: Iterable[bytes], now: float) -> None:
        """The pool has given these up."""
        mask, ghosts, count = self.every - 1, self._keys, 0
        for key in keys:
            if key[0] & mask == 0:
                ghosts[key] = None
                ghosts.move_to_end(key)
                count += self.every
        while len(ghosts) > self._most:
            ghosts.popitem(last=False)
        self.left_blocks += count
        self._since += count
        self._work_s += min(now - self._last, GAP_S)
        self._last = now
        impatient = self._work_s > PATIENCE_S and self._since >= self._pool
        self._balance = 0 if impatient else max(0, self._balance - count)

    def asked(self, keys: Iterable[bytes], held: Iterable[Container[bytes]]) -> None:
        """A prompt needs these, which are not in the pool. `held`: what each tier has. A ghost counts once for each time that it left."""
        mask, count, held = self.every - 1, 0, tuple(held)
        for key in keys:
            if key[0] & mask == 0:
                ghost = key in self._keys
                if ghost:
                    del self._keys[key]
                if ghost or any(key in one for one in held):
                    count += self.every
        self.came(count)

    def came(self, blocks: int) -> None:
        """So many have come back."""
        if blocks:
            self.returned += blocks
            self._since, self._work_s = 0, 0.0
            self._balance = min(self.reach, self._balance + KEEPS * blocks)
