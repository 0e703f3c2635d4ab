"""The gated delta rule: convolutions, states, and what becomes of what is read."""
