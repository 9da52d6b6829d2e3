"""cluster-train: train a PyTorch model on several CPU machines over SSH."""

__version__ = "0.1.0"
