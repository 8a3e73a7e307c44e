"""What a run can do."""
