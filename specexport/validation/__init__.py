"""Prove a bundle against PyTorch: logits, greedy tokens, sampled distribution."""
