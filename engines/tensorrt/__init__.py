"""Plans of TensorRT and TensorRT-RTX on an NVIDIA GPU, one Python API for both."""
