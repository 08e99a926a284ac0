"""What makes training on CPUs fast, and no GPU needs: same-host reads, settings of malloc."""
