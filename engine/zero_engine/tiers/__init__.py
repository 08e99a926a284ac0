"""Where weights and optimizer state rest between uses: on the device, in host memory, on disk."""
