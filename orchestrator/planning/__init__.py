"""Pure decisions: specs and facts in, plans out. No I/O."""
