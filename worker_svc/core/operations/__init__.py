"""What the models' layers are made of: few fused operations behind one interface, several implementations."""
