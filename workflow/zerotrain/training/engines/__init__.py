"""The engines: plain PyTorch and DeepSpeed ZeRO behind one protocol."""
