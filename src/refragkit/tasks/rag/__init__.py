"""The parts of ``evaluate=rag``: its settings, its prompts, what is measured, and how that is shown."""
