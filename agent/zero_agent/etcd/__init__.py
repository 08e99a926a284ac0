"""The etcd at which the agents of a job meet: the user's, or a server that agents start."""
