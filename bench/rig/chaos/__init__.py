"""The parts of `penstock bench chaos`: a pipeline, a load with known answers, a killer, an auditor, a table."""
