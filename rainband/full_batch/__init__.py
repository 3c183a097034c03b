"""Parts that full-batch strategies share: descent directions and line searches."""
