"""What has to be alike on all ranks, or to stay as it was given, or to have the same bits twice."""
