"""ONNX → something that runs one step. Imports only the manifest from export."""
