"""Checkpoint → ONNX. Never imports engines or runtime."""
