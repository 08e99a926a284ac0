"""The store of a job: keys, transactions, leases, watches; on etcd, and in memory."""
