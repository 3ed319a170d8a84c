"""A run of cached blocks of which the front is computed while the tail is loaded, from its end on, until the two meet (Jin et al., "Compute
Or Load KV Cache? Why Not Both?", arXiv 2410.03065: Cake).

The sequence runs, in blocks of its own. Units land only in blocks that no chunk has begun. When all from where it stands up to the end of
the run are here, it goes on behind them. Nobody waits for a load: what is not here is computed.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton.engine.core.sequence import Sequence

LEAST_BLOCKS = 4  # of a chunk, once the meeting is late: it takes half of what is left


class Meeting:
    """Belongs to the engine's thread. Implements `baton.engine.core.sequence.Meets`."""

    def __init__(
        self, seq: Sequence, front: int, end: int, block_size: int, arrived: Callable[[], Seq[bool]], narrow: Callable[[int], None]
    ) -> None:
        """Blocks up to `end` are loaded, the last one first; they are expected to meet at block `front`. `arrived`: which have come, in
        that order; `narrow`: no more than so many of them come any more."""
        self.seq, self.end = seq, end
        self._front, self._size = front, block_size
        self._arrived, self._narrow = arrived, narrow
        self._lowest = 0  # block that no chunk has begun

    @property
    def here(self) -> int:
        """The first block from which on all have come; `end`: none has."""
        count = 0
        for one in self._arrived():
            if not one:
                break
            count += 1
        return max(self.end - count, self._lowest)

    @property
    def over(self) -> bool:
        """Whether the sequence has reached what has come, or the end."""
        return self.seq.computed >= self.here * self._size

    def take(self, computed: int, most: int) -> int:
        """How many of at most `most` tokens the next chunk computes. Nothing lands any more in a block that it begins."""
        here, stands = self.here, -(-computed // self._size)
        late = stands >= self._front
        stop = min(here, stands + max(LEAST_BLOCKS, (here - stands) // 2) if late else self._front)
        n = max(0, min(most, stop * self._size - computed))
        self._lowest = max(self._lowest, -(-(computed + n) // self._size))
        self._narrow(self.end - self._lowest)
        return n
