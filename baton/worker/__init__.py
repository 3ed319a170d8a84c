"""What the two kinds of worker share: an engine's place in the cluster, and its words on the wire."""
