"""A policy outside of this package: ONNX and TorchScript files, what a reader of them must know, and their errors."""
