"""Prints its rank: what is left of a launch when the job is nothing."""

import os

print("rank", os.environ.get("RANK") or os.environ.get("PMI_RANK"))
