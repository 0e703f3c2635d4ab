"""What `penstock bench chaos` is made of: a pipeline, a load with known answers, a killer, an auditor, a table."""
