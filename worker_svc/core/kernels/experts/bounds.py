"""The numbers of gpt-oss's gate (OpenAI, 2025)."""

CLAMP = 7.0  # no gate is larger, no up further from 0
CLAMPED_SLOPE = 1.702  # of the gate in its sigmoid
