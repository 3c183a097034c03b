"""A model as flat vectors: layout, parameters, gradients, optimizers."""
