"""Training jobs: settings, the forward step, checkpoints, reports, the run itself."""
