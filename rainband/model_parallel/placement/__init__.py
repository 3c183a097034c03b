"""Which unit of a model runs on which machine: measuring, predicting and choosing."""
