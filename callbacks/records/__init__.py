"""What a run writes for people: console, metrics, responses, health."""
