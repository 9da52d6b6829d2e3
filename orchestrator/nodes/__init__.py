"""Reaching a machine: one seam (`transport.Transport`), over SSH or locally."""
