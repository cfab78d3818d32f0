"""The same graphs for TensorRT: what it refuses, its form of a graph, and plans built from it."""
