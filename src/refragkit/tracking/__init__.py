"""MLflow and plots."""
