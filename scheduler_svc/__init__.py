"""Decides which sequence computes what, when and where: blocks, batches, preemption and ends."""
