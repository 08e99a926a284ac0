"""A plug-in for stock torchrun: `--rdzv-backend=zero-etcd`, a rendezvous in etcd v3."""
