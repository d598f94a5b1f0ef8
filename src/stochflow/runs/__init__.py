"""From settings to a run folder that survives: configuration, tasks, experiments, checkpoints, export."""
