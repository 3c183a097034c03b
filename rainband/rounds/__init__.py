"""Rounds of split batches: each batch of a script is divided among the workers, which average their gradients."""
