"""Frozen records: what an inventory asks, what nodes are, what a run is. No I/O."""
