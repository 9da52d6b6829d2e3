"""Effects over the nodes: probe, provision, sync, launch, follow, doctor."""
