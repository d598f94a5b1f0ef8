"""Plain torch: what one training iteration means. Rollouts, terms, objectives, replay."""
