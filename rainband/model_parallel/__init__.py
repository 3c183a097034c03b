"""One model over several machines: cutting a module, plans, partitions, splits inside a layer, pipeline schedules."""
