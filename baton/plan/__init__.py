"""What a model needs, and how fast a device could serve it at most: formulae, shapes of models, a sheet of devices."""
