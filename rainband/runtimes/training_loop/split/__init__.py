"""Custom training loops whose workers share each batch: gradients are averaged, and each worker runs the optimizer."""
