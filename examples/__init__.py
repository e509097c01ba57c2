"""Two small trained hybrid checkpoints, and everything that made them."""
