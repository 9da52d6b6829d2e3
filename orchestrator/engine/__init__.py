"""The use cases: each composes actions and plans, emits events, and returns a value. Nothing here prints or exits."""
