"""What other programs show of a run: curves for TensorBoard, Weights & Biases, trackio and Prometheus."""

__all__: list[str] = []
