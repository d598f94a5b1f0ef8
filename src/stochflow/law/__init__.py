"""What is true of a policy: exact laws, best achievable laws, metrics, modes, verdicts."""
