"""The worker: one GPU group that carries out step plans. It decides nothing."""
