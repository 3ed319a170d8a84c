"""What prefill and decode workers share: an engine's place in the cluster and its wire format."""
