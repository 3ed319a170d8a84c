"""How long the parts of a cluster take: models of a few numbers each, with their uncertainty, fitted to measurements or from a sheet."""
