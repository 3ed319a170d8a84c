"""Which sequences a step computes, in which blocks, and what came of it. Pure decisions and plain data: nothing here imports torch."""
