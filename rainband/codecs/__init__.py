"""Codecs: gradients, parameters and models in fewer bytes, for slow networks."""
