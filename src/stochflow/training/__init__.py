"""The loop: where batches come from, and the trainer."""
