"""What processes say to each other, and what all packages share. Standard library only."""
