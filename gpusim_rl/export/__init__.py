"""Policy export: ONNX and TorchScript files, a card that describes them, and error checks."""

CARD = "policy.json"
SOURCE = "policy.c"
