"""Drafting heads: published checkpoints of Medusa, EAGLE and MTP → graphs that read the target."""
