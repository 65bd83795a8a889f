"""Curves of a run for other programs: TensorBoard, Weights & Biases, trackio and Prometheus."""

__all__: list[str] = []
