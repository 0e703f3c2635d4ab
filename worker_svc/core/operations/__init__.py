"""The operations of which models' layers are made: few and fused, one interface, several implementations."""
