"""Starting processes and keeping them alive: on this machine or under Ray; on Kubernetes, resizing their pools."""
