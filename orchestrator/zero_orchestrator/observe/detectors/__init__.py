"""The judges of reports: which rank, link or storage is slow, and whom a hung job waits for."""
