"""Which etcd a job meets at, and one of this machine's own."""
