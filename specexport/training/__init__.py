"""Training of drafting heads: data from the target, modules, the loop."""
