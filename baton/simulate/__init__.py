"""A cluster without processes, in virtual time: the router's own code, and workers that are models of workers."""
