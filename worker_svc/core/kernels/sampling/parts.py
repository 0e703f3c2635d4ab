"""The parts of the vocabulary of which one is drawn first, then a token of it."""

PART_TOKENS = 4096  # of a part
PART_COUNTER = 1 << 32  # the number of the noise from which parts draw; tokens draw by their ids
